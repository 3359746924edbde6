"""The Triton select_topk under the interpreter, with many ties."""

import pytest
import torch

from aspire.ops.select_topk.reference import select_topk

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize("coverage", [None, 0.5, 0.9])
@pytest.mark.parametrize("num_units", [37, 300])
@pytest.mark.parametrize("keep", [32768, 128], ids=["in registers", "in chunks"])
def test_equals_the_reference(monkeypatch: pytest.MonkeyPatch, keep: int, num_units: int,
                              coverage: float | None) -> None:
    """Sums are exact in eighths. Planted faults: ties to the higher index; a chunk's start left out of its indices."""
    import aspire.ops.select_topk.triton as module

    monkeypatch.setattr(module, "KEEP", keep)
    scores = torch.randint(0, 9, (6, num_units), generator=torch.Generator().manual_seed(num_units)).float() / 8
    first = torch.tensor([0, 3, 0, 5, num_units, 0])
    last = torch.tensor([num_units, 30, 17, num_units + 5, num_units, 1])
    k = torch.tensor([10, 20, 0, 40, 3, 2])
    expected = select_topk(scores, first, last, k, capacity=25, coverage=coverage)
    found = module.select_topk(scores, first, last, k, capacity=25, coverage=coverage)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
