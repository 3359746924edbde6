"""The Triton key_scores under the interpreter."""

from dataclasses import replace

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


def test_blocks_of_the_same_rows() -> None:
    """Three passes over the same rows, each with queries of its own, are scored by one launch as one by one, into a
    part of a larger buffer. Planted faults: the first pass's log-sum-exp for all; rows past the first block's end
    taken for padding."""
    from aspire.ops.key_scores.triton import key_scores as kernel

    case = make_case(CaseSpec((RowSpec(290, 5), RowSpec(41, 1), RowSpec(30, 1, True)), num_heads=9, num_kv_heads=3,
                              probes=3), seed=1)
    assert case.probe is not None
    logits, norms, alone = [], [], []
    for layer in range(3):
        probe = replace(case.probe, logits=torch.full_like(case.probe.logits, torch.nan))
        _, lse = paged_attention(case.query * (1 + layer), case.key_cache, case.value_cache, case.rows, None,
                                 case.options, probe)
        assert lse is not None
        logits.append(probe.logits)
        norms.append(lse)
        alone.append(key_scores(probe, lse, case.rows, unit=4, reduce="mean"))
    together = replace(case.probe, logits=torch.cat(logits))
    store = torch.full((5, *alone[0].shape), -1.0)
    for function in (kernel, key_scores):
        function(together, torch.cat(norms), case.rows, unit=4, reduce="mean", out=store[1:4].flatten(0, 1))
        for layer, n, kv_len in ((0, 0, 290), (1, 0, 290), (2, 0, 290), (0, 1, 41), (2, 1, 41)):
            count = -(-kv_len // 4)
            torch.testing.assert_close(store[1 + layer, n, :count], alone[layer][n, :count])
        assert (store[[0, 4]] == -1).all()
        store[1:4] = -1.0
