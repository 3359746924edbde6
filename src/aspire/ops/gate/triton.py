"""gate on CUDA: one program per piece of a token's row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def gate_kernel(
    gate_up,  # [T, 2 * size]
    out,  # [T, size]
    stride, size: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < size
    first = tl.load(gate_up + t * stride + i, mask=ok)
    second = tl.load(gate_up + t * stride + size + i, mask=ok).to(tl.float32)
    x = first.to(tl.float32)
    if ACTIVATION == "silu":
        active = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":  # tanh(y) = 2 sigmoid(2y) - 1
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        active = x / (1.0 + tl.exp(-2.0 * y))
    else:
        active = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out + t * size + i, (active.to(first.dtype).to(tl.float32) * second).to(first.dtype), mask=ok)


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """See reference.py."""
    num_tokens, width = gate_up.shape
    size = width // 2
    assert gate_up.stride(1) == 1, "a row is contiguous"
    assert activation in ("silu", "gelu_tanh", "gelu"), activation
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        gate_kernel[(num_tokens, triton.cdiv(size, BLOCK))](gate_up, out, gate_up.stride(0), size=size,
                                                            ACTIVATION=activation, BLOCK=BLOCK, num_warps=4)
    return out
