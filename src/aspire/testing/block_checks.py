"""A check of copy_blocks for whatever computes it: stores of several types, rows that differ, poisoned targets."""

from collections.abc import Callable

import torch
from torch import Tensor

from aspire.ops.copy_blocks.store import BlockStore, store_of_buffer, store_of_layers

CopyBlocks = Callable[[BlockStore, Tensor, BlockStore, Tensor], None]


def check_round_trip(copy_blocks: CopyBlocks, dtype: torch.dtype, shape: tuple[int, int, int], device: str) -> None:
    """Blocks 5, 0 and 3 of six go into rows 2, 0, 1 of a buffer and from there into blocks 1, 4, 5 of another cache.

    shape: block size, KV heads, head dim. AssertionError where a byte is wrong or one beside the targets has changed.
    """
    def caches(fill: int | None) -> list[Tensor]:
        size = (6, *shape)
        count = torch.empty(size, dtype=dtype).numel() * dtype.itemsize
        return [(torch.randint(256, (count,), dtype=torch.uint8) if fill is None else
                 torch.full((count,), fill, dtype=torch.uint8)).to(device).view(dtype).view(size) for _ in range(4)]

    source, target = caches(None), caches(0xA5)
    buffer = torch.full((4, 4, source[0][0].numel() * dtype.itemsize), 0x5A, dtype=torch.uint8, device=device)
    packed = store_of_buffer(buffer)
    blocks, rows, back = (torch.tensor(ids, device=device) for ids in ([5, 0, 3], [2, 0, 1], [1, 4, 5]))
    copy_blocks(store_of_layers(source), blocks, packed, rows)
    copy_blocks(packed, rows, store_of_layers(target), back)
    assert bool((buffer[3] == 0x5A).all()), "a row of the buffer that is nobody's target has changed"
    for old, new in zip(_bytes(source), _bytes(target), strict=True):
        assert torch.equal(new[back], old[blocks]), "a block came back changed"
        assert bool((new[[0, 2, 3]] == 0xA5).all()), "a block that is nobody's target has changed"


def _bytes(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors]
