"""What a draft's margin (perturbed best minus second-best logit) says about its acceptance."""

import math
from bisect import bisect_right
from collections.abc import Sequence

EDGES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.5, 7.0, 12.0)


class MarginEvidence:
    """A log-odds shift of the request's own rate, per bucket of margins, learnt over all requests.

    Buckets are in nats of logit margin. Each shift is a stochastic-gradient logistic fit with a shrinking step.
    """

    def __init__(self) -> None:
        self._shift = [0.0] * (len(EDGES) + 1)
        self._odds = [1.0] * (len(EDGES) + 1)  # exp(shift): what a margin does to the odds
        self._weight = [0.0] * (len(EDGES) + 1)

    def rate_given(self, margin: float, rate: float) -> float:
        """Chance of acceptance of a draft with this margin when the request's rate there is `rate`."""
        return rate * self.lift(margin, rate)

    def lift(self, margin: float, rate: float) -> float:
        """That chance over `rate`."""
        odds = self._odds[bisect_right(EDGES, margin)]
        return odds / (1.0 + rate * (odds - 1.0))

    def learn(self, margins: Sequence[float | None], rates: Sequence[float], num_accepted: int) -> None:
        """Drafts of a round in order, with the request's rates there: the first `num_accepted` were accepted, a
        further one was not."""
        weights, shifts, odds_of = self._weight, self._shift, self._odds
        for place, (margin, rate) in enumerate(zip(margins, rates, strict=False)):
            if margin is None:
                continue
            bucket = bisect_right(EDGES, margin)
            odds = odds_of[bucket] * rate
            guess = odds / (1.0 - rate + odds)
            # Newton steps on the bucket's log likelihood, with a unit-variance prior around no shift.
            weight = weights[bucket] = weights[bucket] * 0.999 + guess * (1.0 - guess)
            shift = shifts[bucket] + ((place < num_accepted) - guess) / (1.0 + weight)
            shift = shifts[bucket] = -6.0 if shift < -6.0 else 6.0 if shift > 6.0 else shift
            odds_of[bucket] = math.exp(shift)
