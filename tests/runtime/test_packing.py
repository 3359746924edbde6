"""The packed bytes of a step equal those of a plain loop over rows and tokens."""

import math
import random
from dataclasses import fields

import pytest
import torch

from aspire.ops.locate.values import StepInputs
from aspire.runtime.batch import BatchBuilder, BatchLayout, StepShape, spread_queries
from aspire.schedule.plan import BlockUpdate, RowKind, StepPlan
from aspire.testing.step_cases import random_row

SPARSE = RowKind.SPARSE
Lists = dict[str, list[int]]


def plain_lists(layout: BatchLayout, plan: StepPlan) -> Lists:
    """Fields of StepInputs by the obvious loop."""
    lists: Lists = {f.name: [] for f in fields(StepInputs)}
    lists["query_start"].append(0)
    for index, row in enumerate(plan.rows):
        first, is_sparse = lists["query_start"][-1], row.kind is SPARSE
        renewing = is_sparse and (row.num_drafted + 1) % layout.refresh_every == 0
        lists["query_start"].append(first + row.num_tokens)
        for offset in range(row.num_tokens):
            lists["token_row"].append(index)
            lists["token_offset"].append(offset)
            lists["token_given"].append(row.tokens[offset] if row.tokens else 0)
        for name, value in (("slot", row.slot), ("start", row.start), ("row_tokens", row.num_tokens),
                            ("num_drafted", row.num_drafted), ("decode", not row.tokens), ("sparse", is_sparse),
                            ("rests", is_sparse and not renewing), ("emits", row.samples and row.emits)):
            lists[name].append(int(value))
        count = 0 if not row.samples else 1 if row.tokens else row.num_tokens
        base = len(lists["pick_token"])
        lists["pick_token"] += range(first + row.num_tokens - count, first + row.num_tokens)
        lists["pick_row"] += [index] * count
        lists["pick_index"] += [base + min(place, count - 1) if count else 0 for place in range(layout.draft_limit + 1)]
        if row.samples and layout.scoring_queries and is_sparse and layout.scores_drafts and renewing:
            lists["draft_row"].append(index)
        if row.samples and layout.scoring_queries and not is_sparse:
            offsets = spread_queries(row.num_tokens, layout.draft_limit + 1, layout.scoring_queries)
            lists["verify_token"] += [first + offset if offset >= 0 else -1 for offset in offsets]
            lists["verify_row"].append(index)
    for update in plan.block_updates:
        for place, block in enumerate(update.blocks, start=update.first):
            lists["update_index"].append(update.slot * layout.blocks_per_slot + place)
            lists["update_block"].append(block)
    return lists


def plain_pack(layout: BatchLayout, lists: Lists, shape: StepShape) -> list[int]:
    queries = max(1, layout.scoring_queries)
    sizes = {"token_row": shape.tokens, "token_offset": shape.tokens, "token_given": shape.tokens,
             "query_start": shape.rows + 1, "pick_token": shape.picks, "pick_row": shape.picks,
             "pick_index": shape.rows * (layout.draft_limit + 1), "verify_token": shape.verify_probes * queries,
             "verify_row": shape.verify_probes, "draft_row": shape.draft_probes, "update_index": shape.updates,
             "update_block": shape.updates}
    fillers = {"token_row": -1, "pick_row": -1, "verify_token": -1, "verify_row": -1, "draft_row": -1,
               "slot": layout.scratch_slot, "update_index": layout.scratch_slot * layout.blocks_per_slot,
               "query_start": lists["query_start"][-1]}
    packed: list[int] = []
    for name, values in lists.items():
        size = sizes.get(name, shape.rows)
        rest = 0 if name == "query_start" else fillers.get(name, 0)  # between fields, up to a multiple of 16 bytes
        packed += values + [fillers.get(name, 0)] * (size - len(values)) + [rest] * (-size % 4)
    return packed


def random_case(seed: int) -> tuple[BatchLayout, StepPlan]:
    chance = random.Random(seed)
    draft_limit = chance.choice([0, 1, 4, 16])
    layout = BatchLayout(
        draft_limit=draft_limit, scoring_queries=chance.choice([0, 1, 2, draft_limit + 1]), scratch_slot=40,
        blocks_per_slot=chance.choice([7, 64]), scores_drafts=chance.random() < 0.7,
        refresh_every=chance.choice([1, 2, 3]))
    rows = tuple(random_row(chance, index, chance.randrange(40), chance.randrange(1, 500), draft_limit)
                 for index in range(chance.choice([0, 1, 5, 40])))
    updates = tuple(BlockUpdate(chance.randrange(40), chance.randrange(3), tuple(range(chance.randrange(3))))
                    for _ in range(chance.randrange(4)))
    return layout, StepPlan(0, rows, (), updates)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("spare", [0, 5], ids=["exact", "padded"])
def test_packed_bytes_equal_those_of_the_plain_loop(seed: int, spare: int) -> None:
    """Planted faults: `end - 1` left out of the picks; verifying rows found by `samples` alone; the padded rest of
    query_start left 0; a span of num_drafted queries where a row holds more."""
    layout, plan = random_case(seed)
    builder = BatchBuilder(layout, device=torch.device("cpu"))
    arrays, shape = builder.collect(plan)
    lists = plain_lists(layout, plan)
    ends = [row.start + row.num_tokens + (0 if row.tokens else layout.draft_limit + 1) for row in plan.rows]
    assert shape == StepShape(
        len(lists["token_row"]), len(plan.rows), len(lists["pick_token"]), len(lists["verify_row"]),
        len(lists["draft_row"]), len(lists["update_index"]), max((row.num_tokens for row in plan.rows), default=0),
        max(ends, default=0))
    padded = StepShape(shape.tokens + spare, shape.rows + spare, shape.picks + spare, shape.verify_probes + spare,
                       shape.draft_probes + spare, shape.updates + spare, 0, 0)
    packing = builder.packing(padded)
    packed = torch.full((len(packing.padding),), 77, dtype=torch.int32)  # whatever the last step left
    packing.fill(packed.numpy(), arrays)
    assert packed.tolist() == plain_pack(layout, lists, padded)


def test_views_follow_the_fields() -> None:
    """Planted fault: pick_index viewed as [K + 1, R]."""
    layout, plan = random_case(7)
    builder = BatchBuilder(layout, device=torch.device("cpu"))
    arrays, shape = builder.collect(plan)
    inputs = builder.build(plan).inputs
    assert inputs.pick_index.shape == (shape.rows, layout.draft_limit + 1)
    for name, values in arrays.items():
        assert getattr(inputs, name).tolist() == values.tolist(), name
    assert math.prod(inputs.verify_token.shape) == shape.verify_probes * max(1, layout.scoring_queries)
