"""The kernel of locate against the reference."""

import os
from dataclasses import fields

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from aspire.ops.locate import reference
from aspire.ops.locate import triton as compiled
from aspire.ops.locate.values import Located, ScoringRows, SlotTables
from aspire.ops.sample.rows import SamplingRows
from aspire.testing.model_op_checks import poisoned_memory
from aspire.testing.step_cases import step_case, to_device

pytestmark = [pytest.mark.interpret] if os.environ.get("TRITON_INTERPRET") == "1" else [pytest.mark.gpu]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def check_equal(got: Located | ScoringRows | SamplingRows | SlotTables, expected: object, path: str = "") -> None:
    for field in fields(got):
        own, other = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(own, Tensor):
            assert own.dtype == other.dtype, f"{path}{field.name}"
            assert torch.equal(own.cpu(), other), f"{path}{field.name}: {own.tolist()}, expected {other.tolist()}"
        elif isinstance(own, Located | ScoringRows | SamplingRows):
            check_equal(own, other, f"{field.name}.")
        else:
            assert own == other, f"{path}{field.name}"


@pytest.mark.parametrize("seed", range(24))
def test_equals_the_reference(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Outputs come poisoned; the changed tables are compared too, scratch apart. Small blocks, so that all parts have
    several programs and changes several rounds.

    Planted faults: changes looked up in the first round only; a part's programs counted with another's size; the tail
    read where the step anchors it anew; flags stored as given."""
    monkeypatch.setattr(compiled, "BLOCK", 4)
    monkeypatch.setattr(compiled, "UPDATES", 4)
    case, there = step_case(seed), step_case(seed, device=DEVICE)
    expected_tables, tables = to_device(case.tables, "cpu"), there.tables
    expected = reference.locate(case.inputs, expected_tables)
    with poisoned_memory():
        got = compiled.locate(there.inputs, tables)
    check_equal(got, expected)
    expected_tables.block_table[-1] = tables.block_table[-1].cpu()  # padded changes meet there
    check_equal(tables, expected_tables)
