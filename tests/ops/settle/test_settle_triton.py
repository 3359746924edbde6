"""The kernel of settle against the reference."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from aspire.ops.settle import reference
from aspire.ops.settle import triton as compiled
from aspire.testing.step_cases import step_case, step_verdicts, to_device

pytestmark = [pytest.mark.interpret] if os.environ.get("TRITON_INTERPRET") == "1" else [pytest.mark.gpu]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("seed", range(24))
def test_equals_the_reference(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Several programs. Planted faults: rows of the second program at the places of the first; padding that counts a
    token; a chunk's pick stored."""
    monkeypatch.setattr(compiled, "BLOCK", 4)
    case, there = step_case(seed), step_case(seed, device=DEVICE)
    verdicts = step_verdicts(case, seed)
    expected = to_device(case.tables, "cpu")
    reference.settle(case.inputs, expected, verdicts)
    compiled.settle(there.inputs, there.tables, verdicts.to(DEVICE))
    assert torch.equal(there.tables.num_known.cpu()[:-1], expected.num_known[:-1])
    assert torch.equal(there.tables.tokens.cpu()[:-1], expected.tokens[:-1])
