"""Estimators against simulated truth. All random draws are seeded: no false alarms."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.speculation.acceptance import (
    AcceptanceEstimator,
    PublishedEstimator,
    SurvivalEstimator,
)
from aspire.speculation.margins import MarginEvidence


def verdict(rng: random.Random, rates: list[float], length: int) -> int:
    """Accepted drafts of a round of `length`, draft j being right with chance rates[j - 1] if all before were."""
    accepted = 0
    while accepted < length and rng.random() < rates[accepted]:
        accepted += 1
    return accepted


def test_published_estimator_reads_point_nine_as_point_77() -> None:
    """DESIGN 2.3: true 0.90 reads as 0.77 at d = 8.

    Planted fault: dividing by d instead of min(a + 1, d) reads .63.
    """
    rng, estimator, reads = random.Random(1), PublishedEstimator(), []
    for _ in range(20_000):
        estimator.observe("a", 8, verdict(rng, [0.9] * 8, 8))
        reads.append(estimator.survival("a", 1)[0])
    assert statistics.mean(reads[100:]) == pytest.approx(0.773, abs=0.004)


@pytest.mark.parametrize("alpha", [0.8, 0.9, 0.96])
@pytest.mark.parametrize("length", [2, 8, 16])
def test_survival_is_unbiased_at_every_length(alpha: float, length: int) -> None:
    """Short rounds too must predict long ones: deeper positions are unobserved, not failed.

    Planted fault: counting positions up to `num_drafted` as reached.
    """
    rng, estimator, errors = random.Random(7), SurvivalEstimator(), []
    for step in range(4000):
        estimator.observe("a", length, verdict(rng, [alpha] * 16, length))
        if step > 200:
            errors.append(estimator.survival("a", 16)[7] - alpha ** 8)
    assert abs(statistics.mean(errors)) < 0.035


def test_positions_are_learnt_apart() -> None:
    """A curve that falls with depth: the first draft .98, the rest .80."""
    rng, estimator = random.Random(3), SurvivalEstimator()
    rates = [0.98] + [0.8] * 15
    for step in range(3000):
        estimator.observe(f"r{step % 40}", 6, verdict(rng, rates, 6))
    survival = estimator.survival("r0", 16)
    assert survival[0] > 0.93
    assert survival[1] / survival[0] < 0.88


def test_requests_are_told_apart_and_new_ones_share_the_mean() -> None:
    rng, estimator = random.Random(5), SurvivalEstimator()
    for _ in range(60):
        for name, alpha in (("low", 0.75), ("high", 0.97)):
            estimator.observe(name, 8, verdict(rng, [alpha] * 8, 8))
    low, new, high = (estimator.survival(name, 8)[7] for name in ("low", "new", "high"))
    assert low < 0.25 < new < high
    assert high > 0.65
    assert estimator.rounds("new") == 0
    assert estimator.rounds("low") == 60


def test_requests_that_do_not_differ_are_shrunk_together() -> None:
    """After 40 rounds each, 20 equal requests are told apart little.

    Planted fault: a fixed strength of 12 (spread .074 instead of .031).
    """
    rng, estimator = random.Random(6), SurvivalEstimator()
    for _ in range(40):
        for i in range(20):
            estimator.observe(f"r{i}", 6, verdict(rng, [0.93] * 6, 6))
    spread = statistics.pstdev(estimator.survival(f"r{i}", 6)[5] for i in range(20))
    assert spread < 0.045


def test_a_regime_change_is_followed() -> None:
    rng, estimator = random.Random(2), SurvivalEstimator()
    for alpha, rounds in ((0.97, 200), (0.7, 25)):
        for _ in range(rounds):
            estimator.observe("a", 8, verdict(rng, [alpha] * 8, 8))
    assert estimator.survival("a", 1)[0] < 0.87


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 16), st.integers(0, 16)), max_size=60))
def test_survival_is_a_falling_probability(verdicts: list[tuple[str, int, int]]) -> None:
    estimators: list[AcceptanceEstimator] = [SurvivalEstimator(), PublishedEstimator()]
    for estimator in estimators:
        for name, drafted, accepted in verdicts:
            estimator.observe(name, drafted, min(drafted, accepted))
        for name in "abcd":
            survival = estimator.survival(name, 16)
            assert len(survival) == 16
            assert all(0.0 <= b <= a <= 1.0 for a, b in zip([1.0, *survival], survival, strict=False))
            estimator.forget(name)
            assert estimator.rounds(name) == 0
        assert 0.0 < estimator.mean_rate <= 1.0


def test_small_margins_lower_confidence_once_learnt() -> None:
    """Drafts with a margin under 0.3 fail half the time, others never: confidence follows, and resets by round.

    Planted fault: margins kept across rounds (the second round then starts unsure).
    """
    rng, estimator = random.Random(11), SurvivalEstimator()
    for _ in range(600):
        accepted, alive = 0, True
        for position in range(1, 7):
            unsure = rng.random() < 0.2
            estimator.note_draft("a", position, 0.2 if unsure else 5.0)
            alive = alive and (not unsure or rng.random() < 0.5)
            accepted += alive
        estimator.observe("a", 6, accepted)
    assert estimator.confidence("a") == 1.0
    estimator.note_draft("a", 1, 5.0)
    sure = estimator.confidence("a")
    estimator.note_draft("a", 2, 0.2)
    assert sure > 1.03
    assert estimator.confidence("a") < 0.75 * sure
    estimator.note_draft("a", 1, 5.0)  # a new round after a preemption
    assert estimator.confidence("a") == pytest.approx(sure, rel=1e-6)


def test_margin_evidence_leaves_the_unseen_alone() -> None:
    evidence = MarginEvidence()
    for _ in range(300):
        evidence.learn([0.01], [0.9], 0)
    assert evidence.rate_given(0.01, 0.9) < 0.2
    assert evidence.rate_given(6.0, 0.9) == pytest.approx(0.9)


@pytest.mark.parametrize(("arguments", "field"), [({"initial_rate": 1.0}, "initial_rate"), ({"limit": 0}, "limit")])
def test_bad_settings_are_named(arguments: dict[str, float], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SurvivalEstimator(**arguments)  # type: ignore[arg-type]
