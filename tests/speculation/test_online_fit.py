"""OnlineFit: what it learns from traffic, and what a step pays for it."""

import random
from collections.abc import Iterable

import pytest

from aspire.speculation.cost import CostModel, KvShape, Sample, fit, kv_shape, nominal
from aspire.speculation.layers import per_layer_lists
from aspire.speculation.online_fit import OnlineFit
from aspire.speculation.selection import SelectionConfig

TRUE = (1.0e-3, 3.6e-3, 2.2e-5, 2.5e-13)


def shape() -> KvShape:
    return kv_shape(per_layer_lists(10, (2, 6)), SelectionConfig(budget=512), 100)


def traffic(rng: random.Random, count: int, *, truth: CostModel, tokens: tuple[int, int], noise: float) -> list[Sample]:
    """Steps of that many tokens and 4 to 40 GB."""
    steps = []
    for _ in range(count):
        n, kv_bytes = rng.randint(*tokens), rng.uniform(4e9, 4e10)
        steps.append(Sample(n, kv_bytes, truth.step_seconds(n, kv_bytes) * rng.gauss(1.0, noise)))
    return steps


def feed(online: OnlineFit, steps: Iterable[Sample]) -> int:
    """How many fits that gave."""
    return sum(online.add(int(s.tokens), s.kv_bytes, s.seconds) is not None for s in steps)


def test_online_fit_follows_and_keeps_what_traffic_does_not_show() -> None:
    """Steady decoding at 60 to 70 tokens says nothing of 1,000: the first model's knee survives."""
    rng, truth = random.Random(4), CostModel(*TRUE, shape())
    slower = CostModel(TRUE[0] * 1.3, *TRUE[1:], shape())
    online = OnlineFit(truth, window=128, every=64)
    fits = 0
    for _ in range(640):
        tokens, kv_bytes = rng.randint(60, 70), rng.uniform(2e10, 2.4e10)
        fits += online.add(tokens, kv_bytes, slower.step_seconds(tokens, kv_bytes)) is not None
    assert fits == 10
    assert online.model.step_seconds(65, 2.2e10) == pytest.approx(slower.step_seconds(65, 2.2e10), rel=0.01)
    assert online.model.step_seconds(1000, 2.2e10) == pytest.approx(truth.step_seconds(1000, 2.2e10), rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_varied_traffic_teaches_as_much_as_a_fit_of_all_of_it(seed: int) -> None:
    """From an assumed model, whose scale is wrong by orders of magnitude. The knee of 164 lies between two of the grid.

    Planted fault: steps weighted alike, whatever they take.
    """
    rng, truth = random.Random(seed), CostModel(*TRUE, shape())
    steps = traffic(rng, 1024, truth=truth, tokens=(20, 600), noise=0.02)
    online = OnlineFit(nominal(shape()), window=512, every=128)
    assert feed(online, steps) == 8
    batch, points = fit(steps, shape()), ((32, 5e9), (100, 3e10), (250, 1e10), (600, 4e10))

    def error(model: CostModel) -> float:
        return max(abs(model.step_seconds(*point) / truth.step_seconds(*point) - 1.0) for point in points)

    assert error(online.model) < max(0.03, error(batch))
    assert online.model.per_byte == pytest.approx(TRUE[3], rel=0.05)


def test_outliers_count_little() -> None:
    """One step in 20 takes 10 times as long, one a fifth. Planted fault: every step trusted fully."""
    rng, truth = random.Random(5), CostModel(*TRUE, shape())
    steps = [Sample(s.tokens, s.kv_bytes, s.seconds * {0: 10.0, 7: 0.2}.get(i % 20, 1.0))
             for i, s in enumerate(traffic(rng, 1024, truth=truth, tokens=(40, 400), noise=0.01))]
    online = OnlineFit(nominal(shape()), window=256, every=128)
    feed(online, steps)
    for point in ((64, 3e10), (300, 1e10)):
        assert online.model.step_seconds(*point) == pytest.approx(truth.step_seconds(*point), rel=0.06)


def test_old_traffic_is_forgotten_and_sums_stay_finite() -> None:
    """A machine that becomes half as fast, after far more steps than weights can grow. Planted fault: sums of the
    knees not scaled with the shared ones."""
    rng = random.Random(6)
    before, after = CostModel(*TRUE, shape()), CostModel(*(2.0 * value for value in TRUE), shape())
    online = OnlineFit(before, window=64, every=64)
    feed(online, traffic(rng, 2048, truth=before, tokens=(40, 400), noise=0.01))
    assert online.model.step_seconds(100, 2e10) == pytest.approx(before.step_seconds(100, 2e10), rel=0.03)
    feed(online, traffic(rng, 960, truth=after, tokens=(40, 400), noise=0.01))
    assert online.model.step_seconds(100, 2e10) == pytest.approx(after.step_seconds(100, 2e10), rel=0.03)


def test_no_step_solves_for_more_than_one_knee(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: all knees solved when the fit is due."""
    solved: list[int] = [0]
    solve = OnlineFit._solve

    def counted(self: OnlineFit, knee: object) -> object:
        solved[0] += 1
        return solve(self, knee)  # type: ignore[arg-type]

    monkeypatch.setattr(OnlineFit, "_solve", counted)
    online = OnlineFit(CostModel(*TRUE, shape()))
    fits = 0
    for step in traffic(random.Random(7), 1024, truth=online.model, tokens=(40, 400), noise=0.01):
        solved[0] = 0
        fits += feed(online, [step])
        assert solved[0] <= 1
    assert fits == 4


def test_steps_without_time_are_left_out() -> None:
    online = OnlineFit(CostModel(*TRUE, shape()), every=4)
    assert [online.add(10, 1e9, 0.0) for _ in range(64)] == [None] * 64
