"""rms_norm and add_rms_norm on CUDA: a few rows per program, each reduced in an order that no other row affects."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scale_row(x, weight, eps, offset, DIM: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """x float32 [ROWS, BLOCK], zero beyond DIM; weight [BLOCK]."""
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    if OFFSET:
        return (normed * (weight.to(tl.float32) + offset)[None, :]).to(dtype)
    return (normed.to(dtype).to(tl.float32) * weight.to(tl.float32)[None, :]).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x,  # [num_rows / HEADS, HEADS, DIM]
    weight,  # [DIM]
    out,  # [num_rows, DIM]
    num_rows, stride, head_stride, eps, offset,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    ok = (row < num_rows)[:, None] & (i < DIM)[None, :]
    place = row // HEADS * stride + row % HEADS * head_stride
    part = tl.load(x + place[:, None] + i[None, :], mask=ok, other=0.0)
    w = tl.load(weight + i, mask=i < DIM, other=0.0)
    y = scale_row(part.to(tl.float32), w, eps, offset, DIM, OFFSET, out.dtype.element_ty)
    tl.store(out + row[:, None] * DIM + i[None, :], y, mask=ok)


@triton.jit(do_not_specialize=["num_rows"])
def add_norm_kernel(
    x, residual,  # [num_rows, DIM]
    weight,  # [DIM]
    out, total,  # [num_rows, DIM]
    num_rows, stride, residual_stride, eps, offset,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    ok = (row < num_rows)[:, None] & (i < DIM)[None, :]
    a = tl.load(x + row[:, None] * stride + i[None, :], mask=ok, other=0.0)
    b = tl.load(residual + row[:, None] * residual_stride + i[None, :], mask=ok, other=0.0)
    w = tl.load(weight + i, mask=i < DIM, other=0.0)
    both = (a.to(tl.float32) + b.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + row[:, None] * DIM + i[None, :], both, mask=ok)
    y = scale_row(both.to(tl.float32), w, eps, offset, DIM, OFFSET, out.dtype.element_ty)
    tl.store(out + row[:, None] * DIM + i[None, :], y, mask=ok)


def shape_of_programs(dim: int) -> tuple[int, int, int]:
    """(BLOCK, ROWS, warps) for rows of `dim`: a function of dim alone, so that a row's sum never changes order."""
    block = triton.next_power_of_2(dim)
    rows = max(1, 512 // block)
    return block, rows, min(8, max(1, rows * block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """See reference.py. x: [T, dim] or [T, heads, dim] with any strides before a contiguous last dimension."""
    assert x.dim() in (2, 3), "rows, or rows of heads"
    assert x.stride(-1) == 1, "the normalised dimension is contiguous"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    dim, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    block, rows, warps = shape_of_programs(dim)
    num_rows = x.shape[0] * heads
    norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, weight, out, num_rows, x.stride(0), x.stride(1) if x.dim() == 3 else 0, eps, offset, HEADS=heads, DIM=dim,
        BLOCK=block, ROWS=rows, OFFSET=bool(offset), num_warps=warps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """See reference.py. x, residual: [T, dim]."""
    assert x.dim() == 2, "rows"
    assert x.stride(1) == residual.stride(1) == 1, "the normalised dimension is contiguous"
    num_rows, dim = x.shape
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if num_rows == 0:
        return out, total
    block, rows, warps = shape_of_programs(dim)
    add_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, residual, weight, out, total, num_rows, x.stride(0), residual.stride(0), eps, offset, DIM=dim, BLOCK=block,
        ROWS=rows, OFFSET=bool(offset), num_warps=warps)
    return out, total
