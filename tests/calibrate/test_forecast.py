"""Step costs from timed steps, and the throughput that follows, against values known beforehand."""

from dataclasses import replace

import pytest

from aspire.bench.acceptance import TimedStep
from aspire.calibrate.forecast import Target, forecast, plain_rate, smooth_survival, with_overhead
from aspire.calibrate.timing import Group, fit_groups, group_steps, scoring_layers
from aspire.speculation.cost import CostModel, kv_shape
from aspire.speculation.layers import dense_plan, per_layer_lists, shared_list
from aspire.speculation.selection import SelectionConfig

KV = kv_shape(per_layer_lists(10, (3, 6)), SelectionConfig(), 1000)
TRUE = CostModel(2e-3, 3e-3, 3e-5, 2e-11, KV)  # knee at 100 tokens
PER_SCORING = 4e-5


def groups() -> list[Group]:
    """Full rows, lists without scores and with: at several token counts and KV bytes, each with its own share."""
    found = []
    for scoring, share in ((0, 1.0), (10, 0.1), (4, 0.4)):
        for rows in (1, 8, 30):
            for drafted in (0, 16):
                tokens = rows * (drafted + 1)
                kv_bytes = rows * 5e7 * (share if drafted == 0 else 1.0)
                found.append(Group(tokens, kv_bytes, TRUE.step_seconds(tokens, kv_bytes) + PER_SCORING * scoring,
                                   20, scoring))
    return found


def test_the_fit_tells_scoring_from_the_rest() -> None:
    """Planted fault: seconds of scoring left in the samples (they end in base: 2.3 ms, and plain decoding looks
    slow)."""
    steps = fit_groups(groups(), KV)
    assert steps.per_scoring == pytest.approx(PER_SCORING, rel=0.15)
    for group in groups():
        expected = TRUE.step_seconds(group.tokens, group.kv_bytes)
        assert steps.cost.step_seconds(group.tokens, group.kv_bytes) == pytest.approx(expected, rel=0.06)
    assert steps.error < 0.03


def test_first_steps_of_a_shape_do_not_count() -> None:
    """They capture graphs. Planted fault: WARM_UP 0 with the mean for the median."""
    steps = [TimedStep("draft", 8, 10.0 + i, 1.0 if i > 1 else 50.0) for i in range(6)]
    steps += [TimedStep("verify", 40, 90.0, 2.0)] * 3 + [TimedStep("draft", 7, 9.0, 1.0)] * 4
    plan = per_layer_lists(10, (3, 6))
    found = group_steps(steps, plan, captured=False)
    assert [(one.tokens, one.seconds, one.count, one.scoring) for one in found] == [(8, 1.0, 4, 2), (40, 2.0, 1, 3)]
    assert found[0].kv_bytes == 13.5


def test_layers_that_score_by_kind_of_step() -> None:
    """A captured step runs the kernels of both kinds. Planted fault: a layer that scores in both counted twice."""
    plan = per_layer_lists(10, (3, 6))
    assert [scoring_layers(plan, kind, captured=False) for kind in ("draft", "verify")] == [2, 3]
    assert scoring_layers(plan, "draft", captured=True) == 5
    assert scoring_layers(shared_list(10, 8), "draft", captured=True) == 1
    assert scoring_layers(dense_plan(10), "verify", captured=True) == 0


def test_forecast_takes_the_best_length() -> None:
    """Against every length by hand. Planted fault: the bonus token forgotten."""
    survival = smooth_survival([950] * 16, [1000] * 16)
    assert survival[:2] == pytest.approx((0.95, 0.9025))
    target = Target(30, 20_000)
    found = forecast(survival, target, TRUE)
    rates = []
    for g in range(1, 17):
        kv = sum(KV.sparse_bytes(20_000, j) for j in range(g)) + KV.full_bytes(20_000 + g)
        seconds = TRUE.step_seconds(30 * (2 * g + 1) / (g + 1), 30 * kv / (g + 1))
        rates.append(30 * (1 + sum(survival[:g])) / (g + 1) / seconds)
    assert found.tokens_per_second == pytest.approx(max(rates))
    assert found.draft_length == rates.index(max(rates)) + 1
    assert 1 < found.draft_length < 16
    assert plain_rate(target, TRUE) == pytest.approx(30 / TRUE.step_seconds(30, 30 * KV.full_bytes(20_000)))
    assert forecast(survival, target, with_overhead(TRUE, 1e-3)).tokens_per_second < found.tokens_per_second
    assert forecast(survival, replace(target, batch=1), TRUE).tokens_per_second < found.tokens_per_second


def test_survival_shrinks_thin_positions_to_the_mean() -> None:
    """Planted fault: positions nobody reached taken for never accepted."""
    survival = smooth_survival([90, 0], [100, 0])
    assert survival == pytest.approx((0.9, 0.81))
    with pytest.raises(ValueError, match="reached"):
        smooth_survival([0, 0], [0, 0])
