"""The torch reference of key_scores against a loop."""

import pytest
import torch

from aspire.ops.key_scores.reference import key_scores
from aspire.ops.paged_attention.reference import paged_attention
from aspire.testing.attention_cases import CaseSpec, RowSpec, make_case


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize(("unit", "window"), [(1, None), (4, None), (16, 20), (7, 50)])
def test_mass_per_unit(unit: int, window: int | None, reduce: str) -> None:
    """Planted faults: unused queries counted in the average; reduced over heads after the unit's sum (max)."""
    rows = (RowSpec(90, 5), RowSpec(41, 1), RowSpec(30, 1, True))
    case = make_case(CaseSpec(rows, window=window, probes=3), seed=unit)
    probe = case.probe
    assert probe is not None
    _, lse = paged_attention(case.query, case.key_cache, case.value_cache, case.rows, case.selection, case.options,
                             probe)
    assert lse is not None
    scores = key_scores(probe, lse, case.rows, unit=unit, reduce=reduce, window=window)
    assert scores.shape == (3, -(-probe.logits.shape[-1] // unit))
    for n, (kv_len, end) in enumerate(((90, 5), (41, 6))):
        expected, used = torch.zeros(scores.shape[1]), 0
        for i, token in enumerate(probe.token[n].tolist()):
            if token < 0:
                continue
            used += 1
            position = kv_len - end + token
            low = 0 if window is None else max(0, position + 1 - window)
            mass = probe.logits[n, i, :, low:position + 1].softmax(-1)  # [H, n]
            for offset, share in enumerate((mass.mean(0) if reduce == "mean" else mass.amax(0)).tolist()):
                expected[(low + offset) // unit] += share
        torch.testing.assert_close(scores[n], expected / used, atol=1e-6, rtol=1e-5)
    assert (scores[2] == 0).all()
