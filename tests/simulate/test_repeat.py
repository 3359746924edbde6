"""Shares over seeds; and the default policy's in every scenario."""

import pytest

from aspire.simulate.repeat import share, standings
from aspire.simulate.suite import MACHINES, compare, contenders, cost_of, scenarios

NAMES = [scenario.name for scenario in scenarios(0, 4, 1.0)]
POLICIES = ["fixed-3", "fixed-4", "fixed-5", "fixed-6", "fixed-7", "fixed-8", "direct", "clairvoyant-batch-rate",
            "clairvoyant-own-rate"]


def test_shares_by_hand() -> None:
    """Ratios 1.1, 0.9 and 1.0. Planted faults: the share of the means (which a slow seed hardly moves); the deviation
    of one seed for that of the mean."""
    found = share([110.0, 18.0, 50.0], [100.0, 20.0, 50.0])
    assert found.mean == pytest.approx(1.0)
    assert found.error == pytest.approx(0.1 / 3 ** 0.5)
    assert found.lowest == pytest.approx(0.9)
    assert share([3.0], [2.0]).error == 0.0
    with pytest.raises(ValueError, match="rates"):
        share([], [])


def test_one_fixed_length_serves_all_seeds() -> None:
    """fixed-4 is the best on average, fixed-2 and fixed-6 each in one seed. Planted faults: the best of each seed taken
    for the best length; the clairvoyant that is listed first."""
    rates = {"fixed-2": [12.0, 6.0], "fixed-4": [10.0, 10.0], "fixed-6": [6.0, 12.0], "direct": [11.0, 12.0],
             "clairvoyant-a": [10.0, 10.0], "clairvoyant-b": [20.0, 12.0]}
    found, = standings(rates)
    assert (found.policy, found.best_fixed) == ("direct", "fixed-4")
    assert found.over_fixed.mean == pytest.approx(1.15)
    assert found.over_each.mean == pytest.approx((11 / 12 + 1) / 2)
    assert found.of_clairvoyant.lowest == pytest.approx(0.55)
    with pytest.raises(ValueError, match=r"policies.*direct"):
        standings({"direct": [1.0]})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_default_policy_in_every_scenario(name: str) -> None:
    """At least the best fixed length, which is chosen afterwards, within two standard errors, and 97 % of the
    clairvoyant; from a cold start, over three seeds.

    Planted faults: requests taken for different from the start (a belief worth 12 drafts: all alike .993 +- .001); the
    batch's rate alone for the price (draining .88 of the clairvoyant).
    """
    known = {entrant.name: entrant for entrant in contenders()}
    rates: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for seed in range(3):
        scenario = next(one for one in scenarios(seed, 32, 4.0) if one.name == name)
        totals = compare(scenario, cost_of(MACHINES["h200-llama-8b"]), [known[policy] for policy in POLICIES])
        for policy, run in totals.items():
            rates[policy].append(run.tokens_per_second)
    found, = standings(rates)
    assert found.over_fixed.mean + 2.0 * found.over_fixed.error >= 1.0, found
    assert found.over_fixed.mean >= 0.997, found
    assert found.of_clairvoyant.mean >= 0.97, found
