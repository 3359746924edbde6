"""store_kv: write new keys and values into the paged cache (torch, any device)."""

import torch
from torch import Tensor


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *,
             key_scale: float = 1.0, value_scale: float = 1.0) -> None:
    """Write token t's key and value at cache position slot_mapping[t] = block * block_size + offset.

    key, value: [T, KH, D]. key_cache, value_cache: [num_blocks, block_size, KH, D], changed in place. slot_mapping:
    int64 [T], negative: skip. Slots of kept tokens are distinct. The cache holds key / key_scale, value / value_scale,
    clamped to the cache type's range when that is an 8-bit float.
    """
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    for source, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        flat = cache.view(-1, *cache.shape[2:])  # [num_blocks * block_size, KH, D]
        kept = source[keep]
        if scale != 1.0:
            kept = kept.float() * (1.0 / scale)  # as the kernel does, to the bit
        if cache.element_size() == 1:
            limit = torch.finfo(cache.dtype).max
            flat.view(torch.uint8)[slots] = kept.float().clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
        else:
            flat[slots] = kept.to(cache.dtype)
