"""What a draft's margin (perturbed best minus second-best logit) says about its acceptance."""

import math
from bisect import bisect_right


class MarginEvidence:
    """A log-odds shift of the request's own rate, per bucket of margins, learnt over all requests.

    Buckets are in nats of logit margin. Each shift is a stochastic-gradient logistic fit with a shrinking step.
    """

    EDGES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.5, 7.0, 12.0)

    def __init__(self) -> None:
        self._shift = [0.0] * (len(self.EDGES) + 1)
        self._weight = [0.0] * (len(self.EDGES) + 1)

    def rate_given(self, margin: float, rate: float) -> float:
        """Chance of acceptance of a draft with this margin when the request's rate there is `rate`."""
        odds = rate / (1.0 - rate) * math.exp(self._shift[bisect_right(self.EDGES, margin)])
        return odds / (1.0 + odds)

    def learn(self, margin: float, rate: float, *, accepted: bool) -> None:
        bucket = bisect_right(self.EDGES, margin)
        guess = self.rate_given(margin, rate)
        # Newton steps on the bucket's log likelihood, with a unit-variance prior around no shift.
        self._weight[bucket] = self._weight[bucket] * 0.999 + guess * (1.0 - guess)
        self._shift[bucket] += (float(accepted) - guess) / (1.0 + self._weight[bucket])
        self._shift[bucket] = max(-6.0, min(6.0, self._shift[bucket]))
