"""Attention of long prompt chunks by torch's own kernels. Letters: Q queries and N keys of all chunks of a call."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

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


# (query [Q, H, D], key [N, KH, D], value [N, KH, D], scale) -> (out [Q, H, D], lse float32 [H, Q]) of one chunk
Piece = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
Merge = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # see ops.merge_attention


class RectangleChunks:
    """Two kernels a chunk: one without a mask for keys before all queries, one for the rest up to the diagonal.

    For a kernel that is fast on a rectangle but knows no mask aligned to the last key, and is planned anew for every
    shape: queries are padded and the rectangle's keys are cut to multiples, so that shapes are few.
    """

    def __init__(self, rectangle: Piece, edge: Piece, merge: Merge, *, query_step: int = 256,
                 key_step: int = 1024) -> None:
        self._rectangle = rectangle
        self._edge = edge
        self._merge = merge
        self._query_step = query_step
        self._key_step = key_step

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, group: ChunkGroup, scale: float) -> Tensor:
        parts, chunks = [], zip(query.split(group.num_queries), key.split(group.num_keys), value.split(group.num_keys),
                                strict=True)
        for q, k, v in chunks:
            cut = (len(k) - len(q)) // self._key_step * self._key_step
            out, lse = self._edge(q, k[cut:], v[cut:], scale)
            if cut:
                spare = -len(q) % self._query_step
                padded = pad(q, (0, 0, 0, 0, 0, spare)) if spare else q
                before, before_lse = self._rectangle(padded, k[:cut], v[:cut], scale)
                out = self._merge(before[:len(q)], before_lse[:, :len(q)], out, lse)
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class CudnnChunks:
    """cuDNN's attention for the rectangle, FlashAttention for the edge."""

    name = "cudnn"

    def __init__(self, merge: Merge) -> None:
        self._chunks = RectangleChunks(cudnn_piece, flash_piece, merge)

    def supports(self, query: Tensor) -> bool:
        """cuDNN's attention is at its best on Hopper and after; its head dims end at 128."""
        return (FlashChunks().supports(query) and query.shape[2] in (64, 128)
                and torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(query.device)[0] >= 9)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, group: ChunkGroup, scale: float) -> Tensor:
        return self._chunks(query, key, value, group, scale)


def flash_piece(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal, aligned to the last key."""
    found = torch.ops.aten._flash_attention_forward(query[None], key[None], value[None], None, None, len(query),
                                                    len(key), 0.0, True, False, scale=scale)
    return found[0][0], found[1][0]


def cudnn_piece(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], None, True, 0.0, False,
        False, scale=scale)
    return found[0][0].transpose(0, 1), found[1].view(query.shape[1], len(query))
