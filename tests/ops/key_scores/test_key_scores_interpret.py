"""The Triton key_scores under the interpreter."""

import pytest
import torch

from aspire.ops.key_scores.reference import key_scores
from aspire.ops.paged_attention.reference import paged_attention
from aspire.testing.attention_cases import CaseSpec, RowSpec, make_case

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize(("unit", "window"), [(1, None), (16, None), (4, 30)])
def test_equals_the_reference(unit: int, window: int | None, reduce: str) -> None:
    """Planted faults: keys past the position counted; heads divided by the padded number of heads."""
    from aspire.ops.key_scores.triton import key_scores as kernel

    rows = (RowSpec(290, 5), RowSpec(41, 1), RowSpec(30, 1, True))
    case = make_case(CaseSpec(rows, num_heads=9, num_kv_heads=3, window=window, probes=3), seed=unit)
    assert case.probe is not None
    _, lse = paged_attention(case.query, case.key_cache, case.value_cache, case.rows, None, case.options, case.probe)
    assert lse is not None
    expected = key_scores(case.probe, lse, case.rows, unit=unit, reduce=reduce, window=window)
    found = kernel(case.probe, lse, case.rows, unit=unit, reduce=reduce, window=window)
    for n, kv_len in enumerate((290, 41)):
        count = -(-kv_len // unit)
        torch.testing.assert_close(found[n, :count], expected[n, :count])
