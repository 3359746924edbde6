"""Attention of long prompt chunks by torch's own kernels. Letters: Q queries and N keys of all chunks of a call."""

from typing import Protocol

import torch
from torch import Tensor

from aspire.attention.chunks import ChunkGroup


class ChunkLibrary(Protocol):
    """Causal attention of chunks at the end of their keys: the last query of each sees all of them."""

    @property
    def name(self) -> str: ...

    def supports(self, query: Tensor) -> bool:
        """By device, dtype and head dim."""
        ...

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, group: ChunkGroup, scale: float) -> Tensor:
        """query [Q, H, D], key and value [N, KH, D] -> [Q, H, D]."""
        ...


class FlashChunks:
    """torch's build of FlashAttention, one call for all chunks. Called below scaled_dot_product_attention because that
    takes neither ragged rows nor a mask aligned to the last key; the operator itself does both, and grouped heads."""

    name = "flash"

    def supports(self, query: Tensor) -> bool:
        dim = query.shape[2]
        return (query.device.type == "cuda" and query.element_size() == 2 and dim % 8 == 0 and dim <= 256
                and torch.backends.cuda.is_flash_attention_available()
                and torch.cuda.get_device_capability(query.device)[0] >= 8)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, group: ChunkGroup, scale: float) -> Tensor:
        out: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, group.query_start, group.key_start, max(group.num_queries), max(group.num_keys),
            0.0, True, False, scale=scale)[0]
        return out
