"""merge_attention on CUDA: one program per query and head block."""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def merge_kernel(
    first, second,  # [Q, H, D]
    first_lse, second_lse,  # float32 [H, Q]
    out,  # [Q, H, D]
    num_heads, first_stride, first_head_stride, second_stride, second_head_stride, first_lse_stride, second_lse_stride,
    D: tl.constexpr, DP: tl.constexpr, HEADS: tl.constexpr,
):
    q = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DP)
    h_ok = h < num_heads
    ok = h_ok[:, None] & (d < D)[None, :]
    a = tl.load(first_lse + h * first_lse_stride + q, mask=h_ok, other=0.0)
    b = tl.load(second_lse + h * second_lse_stride + q, mask=h_ok, other=0.0)
    top = tl.maximum(a, b)
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    x = tl.load(first + q * first_stride + h[:, None] * first_head_stride + d[None, :], mask=ok, other=0.0)
    y = tl.load(second + q * second_stride + h[:, None] * second_head_stride + d[None, :], mask=ok, other=0.0)
    total = a + b
    merged = x.to(tl.float32) * (a / total)[:, None] + y.to(tl.float32) * (b / total)[:, None]
    tl.store(out + (q * num_heads + h[:, None]) * D + d[None, :], merged.to(out.dtype.element_ty), mask=ok)


def merge_attention(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """See reference.py."""
    num_queries, num_heads, dim = first.shape
    assert first.stride(2) == second.stride(2) == 1, "head dim is contiguous"
    assert first_lse.stride(1) == second_lse.stride(1) == 1, "queries of a head are contiguous"
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    width = triton.next_power_of_2(dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, 2048 // width))
    if num_queries:
        merge_kernel[(num_queries, triton.cdiv(num_heads, heads))](
            first, second, first_lse, second_lse, out, num_heads, first.stride(0), first.stride(1), second.stride(0),
            second.stride(1), first_lse.stride(0), second_lse.stride(0), D=dim, DP=width, HEADS=heads, num_warps=4)
    return out
