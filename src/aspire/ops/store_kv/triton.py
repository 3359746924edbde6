"""store_kv on CUDA: one program per token."""

# mypy: disable-error-code="no-untyped-def, attr-defined"

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_kernel(
    key, value,  # [T, KH, D]
    key_cache, value_cache,  # [num_blocks * BS, KH, D]
    slot_mapping,  # int64 [T]
    key_inverse, value_inverse, limit, key_stride, key_head_stride, value_stride, value_head_stride, cache_stride,
    cache_head_stride, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, CLAMP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + t)
    if slot < 0:
        return
    i = tl.arange(0, BLOCK)
    ok = i < HEADS * D
    to = slot * cache_stride + i // D * cache_head_stride + i % D
    k = tl.load(key + t * key_stride + i // D * key_head_stride + i % D, mask=ok)
    v = tl.load(value + t * value_stride + i // D * value_head_stride + i % D, mask=ok)
    if CLAMP:
        k = tl.minimum(tl.maximum(k.to(tl.float32) * key_inverse, -limit), limit)
        v = tl.minimum(tl.maximum(v.to(tl.float32) * value_inverse, -limit), limit)
    tl.store(key_cache + to, k.to(key_cache.dtype.element_ty), mask=ok)
    tl.store(value_cache + to, v.to(value_cache.dtype.element_ty), mask=ok)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *,
             key_scale: float = 1.0, value_scale: float = 1.0) -> None:
    """See reference.py."""
    num_tokens, heads, dim = key.shape
    assert key.stride(2) == value.stride(2) == 1, "head dim is contiguous"
    assert key_cache.stride() == value_cache.stride(), "both caches have one layout"
    assert key_cache.stride(0) == key_cache.shape[1] * key_cache.stride(1), "tokens in a row"
    small = key_cache.element_size() == 1
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(heads * dim)
    store_kernel[(num_tokens,)](
        key, value, key_cache, value_cache, slot_mapping, 1.0 / key_scale, 1.0 / value_scale,
        torch.finfo(key_cache.dtype).max, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        key_cache.stride(1), key_cache.stride(2), HEADS=heads, D=dim, BLOCK=block,
        CLAMP=small or key_scale != 1.0 or value_scale != 1.0, num_warps=min(8, max(1, block // 256)))
