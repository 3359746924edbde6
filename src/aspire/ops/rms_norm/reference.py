"""rms_norm and add_rms_norm: normalisation over the last dimension (torch, any device)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich, arXiv 1910.07467), accumulated in float32.

    x: [..., dim], weight: [dim]. offset 0: rounded to x's dtype before the weight is applied (Llama); else
    (weight + offset) applied in float32 (Gemma), as each family was trained.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (weight.float() + offset)).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual); x, residual: [..., dim]. The sum is rounded before it is normalised."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total
