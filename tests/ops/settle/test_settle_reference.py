"""settle in torch against a plain loop over the rows of a plan."""

import pytest
import torch

from aspire.ops.settle.reference import settle
from aspire.schedule.plan import RowKind
from aspire.testing.step_cases import step_case, step_verdicts, to_device


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_plain_loop(seed: int) -> None:
    """Slots of unfinished prompts, and of nobody in this step, stay as they were.

    Planted faults: the first pick for the last known token; drafts one column early; known tokens counted without the
    bonus token; a prompt's chunk that counts."""
    case = step_case(seed)
    verdicts = step_verdicts(case, seed)
    tables = to_device(case.tables, "cpu")
    settle(case.inputs, tables, verdicts)
    tokens, known = case.tables.tokens.clone(), case.tables.num_known.clone()
    for row, (*picks, accepted, _) in zip(case.plan.rows, verdicts.tolist(), strict=False):
        if not row.samples:
            continue
        if row.emits:
            tokens[row.slot, 0] = picks[accepted]
            known[row.slot] += accepted + 1
        elif row.kind is RowKind.SPARSE:
            tokens[row.slot, row.num_drafted + 1] = picks[0]
    assert torch.equal(tables.num_known[:-1], known[:-1])
    assert torch.equal(tables.tokens[:-1], tokens[:-1])
