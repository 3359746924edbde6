"""gate: the gated activation of an MLP (torch, any device)."""

import torch.nn.functional as F
from torch import Tensor


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """activation(first half) * second half of [T, 2I]: [T, I]. The activation is rounded before the product.

    activation: silu, gelu_tanh (Hendrycks and Gimpel, arXiv 1606.08415, section 2) or gelu.
    """
    first, second = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(first) * second
    return F.gelu(first, approximate="tanh" if activation == "gelu_tanh" else "none") * second
