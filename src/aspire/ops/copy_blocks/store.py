"""The value that says where blocks lie, for copies between the KV cache and a buffer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockStore:
    """Rows of words, each in P parts that lie in tensors of their own: a block's keys and values in every layer.

    Contents are moved as they are, so a word is an int64, or a byte where a part's size is no multiple of eight.
    """

    parts: tuple[Tensor, ...]  # P of [rows, words], int64 or uint8, of one row stride; words are contiguous
    addresses: Tensor  # int64 [P], on the parts' device: where each begins, for kernels

    @property
    def words(self) -> int:
        return self.parts[0].shape[1]

    @property
    def row_stride(self) -> int:
        """Words from one row of a part to the next."""
        return self.parts[0].stride(0)


def store_of_layers(tensors: Sequence[Tensor]) -> BlockStore:
    """A store over contiguous tensors [num_blocks, ...] of any type, one for each part."""
    return _store([_words(tensor.view(len(tensor), -1).view(torch.uint8)) for tensor in tensors])


def store_of_buffer(buffer: Tensor) -> BlockStore:
    """A store over one contiguous tensor uint8 [rows, P, bytes]."""
    return _store([_words(part) for part in buffer.unbind(1)])


def _words(rows: Tensor) -> Tensor:
    """uint8 [rows, bytes] as wide as it goes."""
    wide = rows.shape[1] % 8 == 0 and rows.stride(0) % 8 == 0 and rows.storage_offset() % 8 == 0
    return rows.view(torch.int64) if wide else rows


def _store(parts: Sequence[Tensor]) -> BlockStore:
    assert len({(part.shape[1], part.stride(0), part.dtype) for part in parts}) == 1, "parts are alike"
    addresses = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=parts[0].device)
    return BlockStore(tuple(parts), addresses)
