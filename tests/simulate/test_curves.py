"""Simulated acceptance."""

import itertools
import random
import statistics

import pytest

from aspire.simulate.curves import Rates, Regimes, accepted, constant, luck, random_regimes, recorded


def test_luck_is_uniform_and_fixed() -> None:
    draws = [luck(7, i) for i in range(20_000)]
    assert draws == [luck(7, i) for i in range(20_000)]
    assert statistics.mean(draws) == pytest.approx(0.5, abs=0.01)
    assert statistics.pvariance(draws) == pytest.approx(1 / 12, abs=0.003)
    assert luck(8, 5) != luck(7, 5)


def test_accepted_runs_follow_the_rates() -> None:
    """Planted fault: luck by depth alone (every round of a request the same)."""
    curve = Rates((0.9, 0.5), seed=3)
    runs = [accepted(curve, 10 * i, 3) for i in range(20_000)]
    assert sum(run >= 1 for run in runs) / len(runs) == pytest.approx(0.9, abs=0.01)
    assert sum(run >= 2 for run in runs) / len(runs) == pytest.approx(0.45, abs=0.015)
    assert sum(run >= 3 for run in runs) / len(runs) == pytest.approx(0.225, abs=0.015)
    assert accepted(curve, 5, 0) == 0


def test_regimes_change_where_they_should() -> None:
    curve = Regimes((0, 100), (constant(1.0), constant(0.0)))
    assert accepted(curve, 99, 5) == 5
    assert accepted(curve, 100, 5) == 0
    drawn = random_regimes(random.Random(1), (0.8, 0.9), 50.0, 5000)
    rates = [c.by_depth[0] for c in drawn.curves]
    assert all(a != b for a, b in itertools.pairwise(rates))
    assert 60 <= len(rates) <= 140


def test_recorded_runs_replay_as_recorded() -> None:
    """Runs of 2, 4 (the limit: what follows is unknown, taken as right) and 0: rights TTF TTTTT F."""
    curve = recorded([2, 4, 0], limit=4)
    assert [accepted(curve, position, 4) for position in range(9)] == [2, 1, 0, 4, 4, 3, 2, 1, 0]
    assert accepted(curve, 9, 4) == 2
    assert 0.0 < curve.rate(3, 1) < 1.0


def test_bad_curves_are_named() -> None:
    with pytest.raises(ValueError, match="rates"):
        Rates(())
    with pytest.raises(ValueError, match="starts"):
        Regimes((1,), (constant(0.5),))
    with pytest.raises(ValueError, match="runs"):
        recorded([5], limit=4)
