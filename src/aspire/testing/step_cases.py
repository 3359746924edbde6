"""Random steps for the operators around the model: what a builder gives the device, and slots to go with it."""

import random
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from aspire.ops.judge.reference import judge
from aspire.ops.locate.values import SlotTables, StepInputs
from aspire.ops.sample.rows import Picks
from aspire.runtime.batch import BatchBuilder, BatchLayout, StepShape
from aspire.schedule.plan import BlockUpdate, Row, RowKind, StepPlan

NUM_SLOTS = 23
FULL, SPARSE = RowKind.FULL, RowKind.SPARSE


@dataclass(frozen=True, slots=True)
class StepCase:
    """plan: of which the inputs were made; inputs: padded by a few of some sizes where the seed is odd."""

    layout: BatchLayout
    plan: StepPlan
    inputs: StepInputs
    tables: SlotTables


def step_case(seed: int, *, device: str = "cpu") -> StepCase:
    """Up to 20 rows of every kind in slots of their own, some past the last known context."""
    chance = random.Random(seed)
    draft_limit, block_size, num_blocks = chance.choice([0, 1, 4, 16]), chance.choice([1, 4, 16]), 12
    speculates = draft_limit > 0 and chance.random() < 0.8
    layout = BatchLayout(
        draft_limit=draft_limit, scoring_queries=chance.choice([1, 2, draft_limit + 1]) if speculates else 0,
        scratch_slot=NUM_SLOTS, blocks_per_slot=num_blocks, scores_drafts=chance.random() < 0.7,
        refresh_every=chance.choice([1, 2]))
    slots = chance.sample(range(NUM_SLOTS), chance.choice([1, 2, 7, 20]))
    most = num_blocks * block_size
    known = {slot: chance.randrange(1, most + 2) for slot in slots}
    rows = tuple(sorted((random_row(chance, index, slot, known[slot], draft_limit) for index, slot in enumerate(slots)),
                        key=lambda row: bool(row.tokens)))
    plan = StepPlan(0, rows, (), tuple(_update(chance, slot, num_blocks) for slot in slots if chance.random() < 0.4))
    builder = BatchBuilder(layout, device=torch.device("cpu"))
    arrays, shape = builder.collect(plan)
    packing = builder.packing(_padded(chance, shape) if seed % 2 else shape)
    packed = torch.empty(len(packing.padding), dtype=torch.int32)
    packing.fill(packed.numpy(), arrays)
    return StepCase(layout, plan, packing.views(packed.to(device)),
                    to_device(_tables(seed, layout, block_size, known), device))


def to_device(tables: SlotTables, device: str) -> SlotTables:
    """Copies of all tensors there."""
    values: dict[str, Any] = {field.name: getattr(tables, field.name) for field in fields(tables)}
    copies: dict[str, Any] = {name: value.to(device, copy=True) for name, value in values.items()
                              if isinstance(value, Tensor)}
    return replace(tables, **copies)


def _padded(chance: random.Random, shape: StepShape) -> StepShape:
    """A few more of some sizes, as a graph's are."""
    names = ("tokens", "rows", "picks", "verify_probes", "draft_probes", "updates")
    larger: dict[str, Any] = {name: getattr(shape, name) + chance.choice([0, 5]) for name in names}
    return replace(shape, **larger)


def random_row(chance: random.Random, index: int, slot: int, known: int, draft_limit: int) -> Row:
    """A row of any kind, of a request that has `known` tokens."""
    name, start = str(index), max(0, known - chance.randrange(1, 4))  # a decoding row's start is a lower bound
    kind = chance.choice(["draft", "lossy", "verify", "verify", "chunk", "prompt"])
    if kind == "draft" and draft_limit:
        return Row(name, slot, SPARSE, start, 1, chance.randrange(draft_limit), True, (), False)
    if kind == "lossy":
        return Row(name, slot, SPARSE, start, 1, 0, True)
    if kind in ("chunk", "prompt"):
        tokens = tuple(chance.randrange(1, 99) for _ in range(chance.randrange(1, min(40, known + 1))))
        return Row(name, slot, FULL, known - len(tokens), len(tokens), 0, kind == "prompt", tokens, kind == "prompt")
    num_drafted = chance.randrange(draft_limit + 1)
    return Row(name, slot, FULL, start, num_drafted + 1, num_drafted, True)


def _update(chance: random.Random, slot: int, num_blocks: int) -> BlockUpdate:
    first = chance.randrange(num_blocks)
    count = chance.randrange(1, num_blocks - first + 1)
    return BlockUpdate(slot, first, tuple(chance.randrange(1000) for _ in range(count)))


def _tables(seed: int, layout: BatchLayout, block_size: int, known: dict[int, int]) -> SlotTables:
    """Values differ between slots; scratch holds what the engine's does."""
    noise = torch.Generator().manual_seed(seed)
    size, contexts = NUM_SLOTS + 1, layout.blocks_per_slot * block_size - 2

    def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=noise, dtype=dtype)

    tables = SlotTables(
        num_known=torch.ones(size, dtype=torch.int64),
        tokens=integers(0, 99, (size, layout.draft_limit + 1), torch.int64),
        block_table=integers(0, 1000, (size, layout.blocks_per_slot)), tail_start=integers(0, 60, (size,)),
        quota=integers(0, 9, (size,)), temperature=torch.rand(size, generator=noise), top_k=integers(0, 9, (size,)),
        top_p=torch.rand(size, generator=noise), min_p=torch.rand(size, generator=noise),
        seed=integers(-(1 << 62), 1 << 62, (size,), torch.int64), tail_of=integers(0, 60, (contexts,)),
        quota_of=integers(0, 9, (contexts,)), block_size=block_size, unit=4, first_unit=1)
    for slot, count in known.items():
        tables.num_known[slot] = count
    tables.tail_start[-1] = tables.quota[-1] = 0
    return tables


def step_picks(case: StepCase, seed: int) -> Picks:
    """Of the step's picks: mostly those that the slots drafted, so that runs of every length are accepted; some
    margins are NaN."""
    inputs, tables = case.inputs, case.tables
    noise = torch.Generator().manual_seed(seed)
    count = len(inputs.pick_token)
    token = torch.randint(0, 99, (count,), generator=noise)
    lucky = torch.rand(count, generator=noise) < 0.85
    row = inputs.pick_row
    column = (torch.arange(count) - inputs.pick_index[row, 0] + 1).clamp(0, tables.tokens.shape[1] - 1)
    token = torch.where(lucky & (row >= 0), tables.tokens[inputs.slot[row], column], token)
    margin = torch.rand(count, generator=noise)
    return Picks(token, torch.where(torch.rand(count, generator=noise) < 0.1, torch.nan, margin))


def step_verdicts(case: StepCase, seed: int) -> Tensor:
    """int32 [R, K + 3], as the judge gives them."""
    return judge(step_picks(case, seed), case.inputs, case.tables.tokens)
