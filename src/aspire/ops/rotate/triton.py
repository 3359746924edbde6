"""rotate on CUDA: queries and keys, views of one tensor or not, in one launch; a few heads of a token per program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS_PER_PROGRAM = 8


@triton.jit
def product(a, b):
    """a * b, rounded to their dtype as torch rounds it, in float32."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@triton.jit
def rotate_heads(
    x,  # token's [HEADS, D]
    out,  # token's [HEADS, D], contiguous
    cos, sin,  # token's [HALF]
    start, head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, HB: tl.constexpr,
):
    head = start + tl.arange(0, HB)
    i = tl.arange(0, BLOCK)
    ok = (head < HEADS)[:, None] & (i < HALF)[None, :]
    source = x + head[:, None] * head_stride + i[None, :]
    to = out + head[:, None] * D + i[None, :]
    first, second = tl.load(source, mask=ok), tl.load(source + HALF, mask=ok)
    c = tl.load(cos + i, mask=i < HALF)[None, :]
    s = tl.load(sin + i, mask=i < HALF)[None, :]
    tl.store(to, (product(first, c) - product(second, s)).to(first.dtype), mask=ok)
    tl.store(to + HALF, (product(second, c) + product(first, s)).to(first.dtype), mask=ok)
    if REST > 0:  # partial rotary: dimensions beyond 2 * HALF pass through
        j = 2 * HALF + tl.arange(0, REST)
        ok_rest = (head < HEADS)[:, None] & (j < D)[None, :]
        rest = tl.load(x + head[:, None] * head_stride + j[None, :], mask=ok_rest)
        tl.store(out + head[:, None] * D + j[None, :], rest, mask=ok_rest)


@triton.jit
def rotate_kernel(
    query,  # [T, H, D]
    key,  # [T, K, D]
    cos, sin,  # [T, HALF]
    query_out, key_out,  # [T, H, D], [T, K, D], contiguous
    query_stride, query_head_stride, key_stride, key_head_stride, angle_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    HB: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_query = (H + HB - 1) // HB
    if part < num_query:
        rotate_heads(query + t * query_stride, query_out + t * H * D, cos + t * angle_stride, sin + t * angle_stride,
                     part * HB, query_head_stride, H, D, HALF, BLOCK, REST, HB)
    else:
        rotate_heads(key + t * key_stride, key_out + t * K * D, cos + t * angle_stride, sin + t * angle_stride,
                     (part - num_query) * HB, key_head_stride, K, D, HALF, BLOCK, REST, HB)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See reference.py. The outputs are contiguous. The bits are the reference's."""
    (num_tokens, heads, dim), kv_heads, half = query.shape, key.shape[1], cos.shape[-1]
    assert query.stride(2) == key.stride(2) == cos.stride(1) == sin.stride(1) == 1, "last dimensions are contiguous"
    assert cos.stride(0) == sin.stride(0), "cosines and sines have one layout"
    assert cos.dtype == sin.dtype == query.dtype == key.dtype, "one dtype"
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    if num_tokens == 0:
        return outs[0], outs[1]
    programs = triton.cdiv(heads, HEADS_PER_PROGRAM) + triton.cdiv(kv_heads, HEADS_PER_PROGRAM)
    rest = dim - 2 * half
    rotate_kernel[(num_tokens, programs)](
        query, key, cos, sin, *outs, query.stride(0), query.stride(1), key.stride(0), key.stride(1), cos.stride(0),
        H=heads, K=kv_heads, D=dim, HALF=half, BLOCK=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(rest) if rest else 0, HB=HEADS_PER_PROGRAM, num_warps=1,
        enable_fp_fusion=False)  # else the compiler narrows the products and fuses them, without their rounding
    return outs[0], outs[1]
