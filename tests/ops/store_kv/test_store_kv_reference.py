"""The torch reference of store_kv."""

import torch

from aspire.ops.store_kv.reference import store_kv


def test_writes_where_told_and_nowhere_else() -> None:
    """Planted fault: negative slots wrap around to the end of the cache."""
    key, value = torch.randn(2, 4, 2, 8)
    key_cache, value_cache = torch.full((2, 3, 4, 2, 8), torch.nan)
    store_kv(key, value, key_cache, value_cache, torch.tensor([5, -1, 0, 11]))
    for cache, source in ((key_cache, key), (value_cache, value)):
        flat = cache.view(12, 2, 8)
        assert torch.equal(flat[[5, 0, 11]], source[[0, 2, 3]])
        assert flat[[1, 2, 3, 4, 6, 7, 8, 9, 10]].isnan().all()


def test_eight_bit_cache_scales_and_clamps() -> None:
    """Planted fault: scale multiplied in instead of divided out."""
    key = torch.tensor([[[1000.0, -3.0]]])
    caches = torch.zeros(2, 1, 2, 1, 2).to(torch.float8_e4m3fn)
    store_kv(key, key, caches[0], caches[1], torch.tensor([1]), key_scale=2.0, value_scale=1.0)
    assert caches[0].float()[0, 1, 0].tolist() == [448.0, -1.5]
    assert caches[1].float()[0, 1, 0].tolist() == [448.0, -3.0]
