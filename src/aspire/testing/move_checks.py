"""A check of BlockMover over random plans: requests come and go, their blocks travel, and every row sees its own."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aspire.runtime.cache import KVCache, KVShape
from aspire.runtime.lanes import Lane
from aspire.runtime.offload import BlockMover, CopyBlocks, Transfer
from aspire.schedule.plan import BlockCopy, BlockUpdate, Direction, Row, RowKind, StepPlan

NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_SLOTS, TABLE = 24, 12, 4, 5


def nothing() -> None:
    """A step that takes no time before its rows read."""


@dataclass
class Traffic:
    """Plans and what must be where when they have run: a number for each block's content."""

    chance: random.Random
    tables: list[list[int]] = field(default_factory=lambda: [[] for _ in range(NUM_SLOTS)])
    held: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))  # by device block
    kept: dict[int, int] = field(default_factory=dict)  # by host block
    steps: int = 0

    def next_plan(self) -> StepPlan:
        """One slot changes its owner: blocks of the old one leave, others come back for the new one. One more may grow.
        """
        chance, slot = self.chance, self.chance.randrange(NUM_SLOTS)
        copies = []
        for block in chance.sample(self.tables[slot], chance.randint(0, len(self.tables[slot]))):
            host_block = chance.randrange(NUM_HOST_BLOCKS)
            copies.append(BlockCopy(block, host_block, Direction.TO_HOST))
            self.kept[host_block] = self.held[block]
        taken = {block for other, table in enumerate(self.tables) if other != slot for block in table}
        free = [block for block in range(NUM_BLOCKS) if block not in taken]
        table = self.tables[slot] = chance.sample(free, TABLE)
        for block in chance.sample(table, chance.randint(0, TABLE)):
            if self.kept:
                host_block = chance.choice(sorted(self.kept))
                copies.append(BlockCopy(block, host_block, Direction.TO_DEVICE))
                self.held[block] = self.kept[host_block]
        updates = [BlockUpdate(slot, 0, tuple(table))]
        grows, rest = chance.randrange(NUM_SLOTS), [block for block in free if block not in table]
        if grows != slot and rest and len(self.tables[grows]) == TABLE:
            updates.append(BlockUpdate(grows, len(self.tables[grows]), (rest[0],)))
            self.tables[grows].append(rest[0])
        runs = [s for s in range(NUM_SLOTS) if self.tables[s] and (chance.random() < 0.6)]
        rows = tuple(Row(str(s), s, RowKind.FULL, 0, 1, 0, True) for s in runs)
        self.steps += 1
        return StepPlan(self.steps, rows, (), tuple(updates), (), tuple(copies))

    def run(self, plan: StepPlan) -> tuple[list[int], list[tuple[int, int]]]:
        """What the plan's rows must see, and (block, new number) that they write."""
        seen = [self.held[block] for row in plan.rows for block in self.tables[row.slot]]
        writes = [(self.tables[row.slot][-1], 1000 * plan.step + row.slot) for row in plan.rows]
        for block, number in writes:
            self.held[block] = number
        return seen, writes


def check_moves(make_lane: Callable[[torch.device], Lane], copy_blocks: CopyBlocks, *, device: str, seed: int,
                steps: int = 60, before_rows: Callable[[], None] = nothing,
                before_copies: Callable[[], None] = nothing) -> None:
    """AssertionError where a row reads what is not its own. before_rows, before_copies: delays of the steps' and of the
    copies' work."""
    target = torch.device(device)
    cache = KVCache(KVShape(3, NUM_BLOCKS, 4, 2, 8), dtype=torch.float32, device=target)
    layers = [*cache.key, *cache.value]
    for tensor in layers:
        tensor.copy_(torch.arange(NUM_BLOCKS, device=target)[:, None, None, None])
    lane, traffic = make_lane(target), Traffic(random.Random(seed))
    transfer = Transfer(cache, NUM_HOST_BLOCKS, copy_blocks)
    transfer.capacity = 2
    mover = BlockMover(transfer, lane)
    results: list[tuple[Tensor, list[int]]] = []
    for _ in range(steps):
        plan = traffic.next_plan()
        if plan.copies:
            lane.begin()
            lane.submit(before_copies)
        mover.apply(plan)
        before_rows()
        blocks = torch.tensor([block for row in plan.rows for block in traffic.tables[row.slot]], dtype=torch.int64)
        seen, writes = traffic.run(plan)
        results.append((_read(layers, blocks.to(target)), seen))
        for block, number in writes:
            for tensor in layers:
                tensor[block] = float(number)
    for found, expected in results:
        _compare(found, expected)


def _read(layers: Sequence[Tensor], blocks: Tensor) -> Tensor:
    return torch.stack([tensor[blocks].flatten(1) for tensor in layers])  # [layers, blocks, numbers]


def _compare(found: Tensor, expected: list[int]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float32)[None, :, None].expand(found.shape)
    assert torch.equal(found.cpu(), wanted), f"read {found[0, :, 0].tolist()} where {expected} belong"
