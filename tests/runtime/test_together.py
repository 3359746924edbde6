"""Scores of several layers from few launches."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aspire.ops.key_scores.reference import key_scores
from aspire.ops.paged_attention.reference import paged_attention
from aspire.runtime import together as module
from aspire.runtime.operators import reference_operators
from aspire.runtime.together import ChosenTogether
from aspire.speculation.selection import SelectionConfig
from aspire.testing.attention_cases import CaseSpec, RowSpec, make_case


@pytest.mark.parametrize(("most_bytes", "launches"), [(1 << 30, 3), (0, 5), (2 * 4 * 3 * 3 * 9 * 304, 4)],
                         ids=["room for all", "for one", "for two"])
def test_each_layer_scores_as_alone(monkeypatch: pytest.MonkeyPatch, most_bytes: int, launches: int) -> None:
    """Layers with and without a window. Planted faults: the first layer's window for all; a full buffer scored after
    the next layer has written into it; the second launch's scores at the first one's place."""
    monkeypatch.setattr(module, "MOST_BYTES", most_bytes)
    case = make_case(CaseSpec((RowSpec(290, 5), RowSpec(41, 4)), num_heads=9, num_kv_heads=3, probes=3), seed=1)
    assert case.probe is not None
    calls = 0

    def counted(*args: object, **options: object) -> Tensor:
        nonlocal calls
        calls += 1
        return key_scores(*args, **options)  # type: ignore[arg-type]

    windows = (None, None, None, 20, None)
    config = SelectionConfig(unit=4)
    operators = replace(reference_operators(), key_scores=counted)
    together = ChosenTogether(windows, case.probe.token, case.probe.row, case.rows, config, operators)
    expected = []
    for layer, window in enumerate(windows):
        query, options = case.query * (1 + layer), replace(case.options, window=window)
        for probe in (case.probe, together.probe(query)):
            _, lse = paged_attention(query, case.key_cache, case.value_cache, case.rows, None, options, probe)
            assert lse is not None
        expected.append(key_scores(case.probe, lse, case.rows, unit=4, reduce=config.reduce, window=window))
        together.add(lse)
    torch.testing.assert_close(together.scores[:, : expected[0].shape[1]], torch.cat(expected))
    assert calls == launches
