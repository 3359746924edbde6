"""locate in torch against a plain loop over the rows of a plan."""

import pytest

from aspire.ops.locate.reference import locate
from aspire.schedule.plan import Row, RowKind
from aspire.testing.step_cases import StepCase, step_case, to_device


def first_position(case: StepCase, row: Row) -> int:
    if row.tokens:
        return row.start
    before = row.num_drafted if row.kind is RowKind.SPARSE else 0
    return int(case.tables.num_known[row.slot]) - 1 + before


def block_of(case: StepCase, slot: int, entry: int) -> int:
    """What the table holds once this step's changes are in."""
    for update in case.plan.block_updates:
        if update.slot == slot and update.first <= entry < update.first + len(update.blocks):
            return update.blocks[entry - update.first]
    return int(case.tables.block_table[slot, entry])


def anchor(case: StepCase, row: Row) -> tuple[int, int]:
    """Tail and quota of the row's slot once it is located."""
    tables = case.tables
    if not (row.samples and row.emits):
        return int(tables.tail_start[row.slot]), int(tables.quota[row.slot])
    certain = first_position(case, row) + (row.num_tokens if row.tokens or row.kind is RowKind.SPARSE else 1)
    certain = min(certain, len(tables.tail_of) - 1)
    return int(tables.tail_of[certain]), int(tables.quota_of[certain])


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_plain_loop(seed: int) -> None:
    """Planted faults: a sparse row at its last known token whatever it drafted; the old block of a changed entry; the
    tail of a verification anchored behind its drafts; drafting rows anchored too; a draft's logits at the position of
    its input."""
    case = step_case(seed)
    tables = to_device(case.tables, "cpu")
    located = locate(case.inputs, tables)
    size, width, token, pick = tables.block_size, tables.tokens.shape[1], 0, 0
    for index, row in enumerate(case.plan.rows):
        start = first_position(case, row)
        before = row.num_drafted if row.kind is RowKind.SPARSE else 0
        for offset in range(row.num_tokens):
            position = start + offset
            entry = min(position // size, tables.block_table.shape[1] - 1)
            known = row.tokens[offset] if row.tokens else case.tables.tokens[row.slot, min(before + offset, width - 1)]
            assert located.tokens[token] == known
            assert located.positions[token] == position
            assert located.slot_mapping[token] == block_of(case, row.slot, entry) * size + position % size
            token += 1
        for position in range(start + row.num_tokens - (0 if not row.samples else 1 if row.tokens else row.num_tokens),
                              start + row.num_tokens):
            assert located.picks.position[pick] == position + 1
            for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
                assert getattr(located.picks, name)[pick] == getattr(tables, name)[row.slot]
            pick += 1
        assert located.kv_len[index] == start + row.num_tokens
        assert located.sparse[index] == (row.kind is RowKind.SPARSE)
        assert (tables.tail_start[row.slot], tables.quota[row.slot]) == anchor(case, row)
    assert (located.slot_mapping[token:] == -1).all()
    assert not located.kv_len[len(case.plan.rows) :].any()
    assert not tables.tail_start[-1], "scratch keeps no tail"


@pytest.mark.parametrize("seed", range(40))
def test_scoring_rows_know_their_slots_and_candidates(seed: int) -> None:
    """Planted faults: drafting rows put first; candidates up to the tail of before this step; a draft's query at its
    row's number; padding in the slot of the last row."""
    case = step_case(seed)
    tables = to_device(case.tables, "cpu")
    inputs = case.inputs
    located = locate(inputs, tables)
    scoring = located.scoring
    numbers = [*inputs.verify_row.tolist(), *inputs.draft_row.tolist()]
    assert scoring.row.tolist() == numbers
    assert scoring.num_verify == len(inputs.verify_row)
    for place, number in enumerate(numbers):
        queries = scoring.token[place].tolist()
        if number < 0:
            assert (scoring.slot[place], scoring.last[place], scoring.wanted[place]) == (tables.scratch, 0, 0)
            assert set(queries) == {-1}
            continue
        row = case.plan.rows[number]
        tail, quota = anchor(case, row)
        assert (scoring.slot[place], scoring.wanted[place]) == (row.slot, quota)
        assert (scoring.first[place], scoring.last[place]) == (tables.first_unit, tail // tables.unit)
        if place < scoring.num_verify:
            assert queries == inputs.verify_token[place].tolist()
        else:
            assert queries == [int(inputs.query_start[number]), *[-1] * (len(queries) - 1)]
    assert located.draft_token[:, 0].tolist() == [
        -1 if number < 0 else int(inputs.query_start[number]) for number in inputs.draft_row]
