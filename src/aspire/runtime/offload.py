"""BlockMover: carries out the block copies of plans beside the steps, and lets a step wait for what it needs of them.

What is copied, and when a request may count on it, is schedule/offload.py's decision. Here are the rules of order:

    a copy starts after all earlier steps, whose rows may still read or write the blocks;
    copies keep the order of the plans, since a host block, too, may be given to another content;
    a row starts after all copies from and to the blocks of its table. A block that is copied away can thus be given to
    somebody else at once, and what nobody needs is waited for by nobody.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter

import torch
from torch import Tensor

from aspire.ops.copy_blocks.store import BlockStore, store_of_buffer, store_of_layers
from aspire.runtime.cache import KVCache
from aspire.runtime.host_memory import host_memory
from aspire.runtime.lanes import Lane
from aspire.schedule.plan import BlockCopy, Direction, StepPlan

STAGING_BYTES = 64 << 20  # of the device's memory; large copies run at full speed, and gathering hardly counts

CopyBlocks = Callable[[BlockStore, Tensor, BlockStore, Tensor], None]


class Transfer:
    """Between the cache and host memory, by way of a buffer on the device: blocks are gathered there from all layers
    in one launch, and cross over in runs of consecutive host blocks, without the device's processors."""

    def __init__(self, cache: KVCache, num_host_blocks: int, copy_blocks: CopyBlocks) -> None:
        """Takes num_host_blocks blocks of host memory (see `host_memory` for its errors) and STAGING_BYTES at most of
        the device's."""
        layers = [tensor for pair in zip(cache.key, cache.value, strict=True) for tensor in pair]
        device = layers[0].device
        self.device = device
        self._copy_blocks = copy_blocks
        self._cache = store_of_layers(layers)
        part_bytes = layers[0][0].numel() * layers[0].element_size()
        self.block_bytes = len(layers) * part_bytes
        self.capacity = max(1, min(num_host_blocks, STAGING_BYTES // self.block_bytes))
        self._buffer = torch.empty(self.capacity, len(layers), part_bytes, dtype=torch.uint8, device=device)
        self._staging = store_of_buffer(self._buffer)
        self._rows = torch.arange(self.capacity, device=device)
        self._host = host_memory((num_host_blocks, len(layers), part_bytes), device)

    def gather(self, blocks: Sequence[int]) -> None:
        """Blocks, `capacity` at most, into the buffer."""
        self._copy_blocks(self._cache, self._indices(blocks), self._staging, self._rows[:len(blocks)])

    def send(self, host_blocks: Sequence[int]) -> None:
        """The buffer into host blocks."""
        for row, first, count in runs(host_blocks):
            self._host[first:first + count].copy_(self._buffer[row:row + count], non_blocking=True)

    def fetch(self, host_blocks: Sequence[int]) -> None:
        """Host blocks into the buffer."""
        for row, first, count in runs(host_blocks):
            self._buffer[row:row + count].copy_(self._host[first:first + count], non_blocking=True)

    def scatter(self, blocks: Sequence[int]) -> None:
        """The buffer into blocks."""
        self._copy_blocks(self._staging, self._rows[:len(blocks)], self._cache, self._indices(blocks))

    def _indices(self, blocks: Sequence[int]) -> Tensor:
        host = torch.tensor(blocks, dtype=torch.int64)
        return host if self.device.type == "cpu" else host.pin_memory().to(self.device, non_blocking=True)


def runs(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """(place, first, count) of each run of consecutive numbers."""
    found: list[tuple[int, int, int]] = []
    for place, number in enumerate(numbers):
        if found and number == found[-1][1] + found[-1][2]:
            begun, first, count = found[-1]
            found[-1] = begun, first, count + 1
        else:
            found.append((place, number, 1))
    return found


class BlockMover:
    """One per runner. `apply` comes once for every plan, in order, before the plan's rows are launched."""

    def __init__(self, transfer: Transfer, lane: Lane) -> None:
        self._transfer = transfer
        self._lane = lane
        self._mark_of: dict[int, int] = {}  # device block -> mark of the last copy from or to it
        self._last = 0  # of these marks
        self._needed: dict[int, int] = {}  # slot -> mark that its rows have to wait for

    def apply(self, plan: StepPlan) -> None:
        """Start the plan's copies, and let its rows wait for those that touch their blocks."""
        if self._mark_of and self._lane.settled() >= self._last:
            self._mark_of.clear()
        if plan.copies:
            self._start(plan.copies)
        for update in plan.block_updates:
            needed = max((self._mark_of.get(block, 0) for block in update.blocks), default=0) if self._mark_of else 0
            if update.first:  # else a new table: what the slot's last owner needed is of no interest
                needed = max(needed, self._needed.get(update.slot, 0))
            self._needed[update.slot] = needed
        if self._needed:
            needed = max((self._needed.pop(row.slot, 0) for row in plan.rows), default=0)
            if needed:
                self._lane.join(needed)

    def _start(self, copies: Iterable[BlockCopy]) -> None:
        self._lane.begin()
        for direction, group in groupby(copies, attrgetter("direction")):
            pairs = _last_of_each(group, direction)
            for first in range(0, len(pairs), self._transfer.capacity):
                bufferful = sorted(pairs[first:first + self._transfer.capacity], key=itemgetter(1))  # for long runs
                blocks, host_blocks = zip(*bufferful, strict=True)
                self._move(direction, blocks, host_blocks)

    def _move(self, direction: Direction, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """One bufferful. The mark comes as soon as the device's blocks are done with."""
        lane, transfer = self._lane, self._transfer
        if direction is Direction.TO_HOST:
            lane.submit(lambda: transfer.gather(blocks))
            self._last = lane.mark()
            lane.submit(lambda: transfer.send(host_blocks))
        else:
            lane.submit(lambda: transfer.fetch(host_blocks))
            lane.submit(lambda: transfer.scatter(blocks))
            self._last = lane.mark()
        self._mark_of.update(dict.fromkeys(blocks, self._last))


def _last_of_each(copies: Iterable[BlockCopy], direction: Direction) -> list[tuple[int, int]]:
    """(block, host block) without copies whose target another one overwrites: those of a bufferful run at once."""
    to_host = direction is Direction.TO_HOST
    last = {copy.host_block if to_host else copy.block: copy for copy in copies}
    return [(copy.block, copy.host_block) for copy in last.values()]
