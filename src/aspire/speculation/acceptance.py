"""How likely drafts are to be accepted, per request, learnt from verdicts.

"Survival" of length j = probability that the first j drafts of a round are all accepted; the tokens a verification of
g drafts is expected to emit are then 1 + survival_1 + ... + survival_g.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class AcceptanceEstimator(Protocol):
    """Told every verdict, asked by cadences. A request it never heard of has the shared expectation."""

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """A verification of `num_drafted` drafts accepted the first `num_accepted`. No drafts: a plain step."""
        ...

    def note_draft(self, request_id: str, margin: float | None) -> None:
        """A draft was made whose best perturbed logit led by `margin`; called in order, between two `observe`s."""
        ...

    def survival(self, request_id: str, length: int) -> Sequence[float]:
        """[P(drafts 1..j all accepted) for j = 1..length], for a round not yet begun. Not to be changed."""
        ...

    def confidence(self, request_id: str) -> float:
        """P(all noted drafts of the running round are right) over what `survival` says of them; 1: no evidence."""
        ...

    def rounds(self, request_id: str) -> int:
        """Verdicts observed for the request: grows whenever its `survival` may have changed."""
        ...

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        ...

    @property
    def mean_rate(self) -> float:
        """Chance that a draft is accepted given all before it were, over recent traffic."""
        ...


@dataclass(slots=True)
class _Record:
    """One request's discounted counts; index j - 1 is draft position j."""

    reached: list[float]
    accepted: list[float]
    rounds: int = 0
    survival: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    confidence: float = 1.0


class SurvivalEstimator:
    """Discounted counts per draft position over a shared prior (three levels of shrinkage).

    A verification of length d with a accepted reached positions 1..min(a + 1, d) and passed 1..a; deeper ones are
    unobserved, not failures (the Kaplan-Meier view of censoring). Per request: the chance at position j is
    (A_j + k * prior_j) / (R_j + k), where prior_j is the request's own pooled chance, shifted in log odds by what all
    requests together show at j; the pooled chance in turn shrinks to the one over all requests.
    """

    def __init__(self, *, initial_rate: float = 0.9, limit: int = 64, discount: float = 0.95,
                 pool_strength: float = 6.0, position_strength: float = 24.0, shared_discount: float = 0.999) -> None:
        """discount: weight of old verdicts of a request, per verdict; shared_discount: per verdict of anyone.
        *_strength: how many reached drafts the prior of a level is worth. limit: the deepest position counted."""
        if not 0.0 < initial_rate < 1.0:
            raise ValueError(f"initial_rate must be in (0, 1), got {initial_rate!r}")
        self.limit = limit
        self._discount = discount
        self._pool_strength = pool_strength
        self._position_strength = position_strength
        self._shared_discount = shared_discount
        self._initial_rate = initial_rate
        self._records: dict[str, _Record] = {}
        self._shared_reached = [0.0] * limit
        self._shared_accepted = [0.0] * limit
        self._fresh_at = -1  # verdicts seen when `_fresh` was made
        self._fresh: list[float] = []
        self._num_verdicts = 0
        self._margins = MarginEvidence()

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted, "accepted drafts outside the verified ones"
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record([0.0] * self.limit, [0.0] * self.limit)
        record.rounds += 1
        self._learn_margins(record, num_drafted, num_accepted)
        if num_drafted == 0:
            return
        passed = min(num_accepted, self.limit)
        reached = min(num_accepted + 1, num_drafted, self.limit)
        keep, keep_shared = self._discount, self._shared_discount
        record.reached = [count * keep for count in record.reached]
        record.accepted = [count * keep for count in record.accepted]
        self._shared_reached = [count * keep_shared for count in self._shared_reached]
        self._shared_accepted = [count * keep_shared for count in self._shared_accepted]
        for j in range(reached):
            record.reached[j] += 1.0
            self._shared_reached[j] += 1.0
        for j in range(passed):
            record.accepted[j] += 1.0
            self._shared_accepted[j] += 1.0
        self._num_verdicts += 1
        record.survival = []

    def note_draft(self, request_id: str, margin: float | None) -> None:
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record([0.0] * self.limit, [0.0] * self.limit)
        rate = self._rates(record)[min(len(record.margins), self.limit - 1)]
        record.margins.append(margin)
        if margin is not None:
            record.confidence *= self._margins.rate_given(margin, rate) / rate

    def survival(self, request_id: str, length: int) -> Sequence[float]:
        assert length <= self.limit, f"survival of {length} drafts asked, {self.limit} counted"
        record = self._records.get(request_id)
        if record is None:
            return _cumulative(self._shared_rates())[:length]
        if not record.survival:
            record.rates = []
            record.survival = _cumulative(self._rates(record))
        return record.survival[:length]

    def confidence(self, request_id: str) -> float:
        record = self._records.get(request_id)
        return 1.0 if record is None else record.confidence

    def rounds(self, request_id: str) -> int:
        record = self._records.get(request_id)
        return 0 if record is None else record.rounds

    def forget(self, request_id: str) -> None:
        self._records.pop(request_id, None)

    @property
    def mean_rate(self) -> float:
        return self._pooled(self._shared_accepted, self._shared_reached, self._initial_rate)

    def _pooled(self, accepted: list[float], reached: list[float], prior: float) -> float:
        return (sum(accepted) + self._pool_strength * prior) / (sum(reached) + self._pool_strength)

    def _shared_rates(self) -> list[float]:
        """Chance at each position over all requests, shrunk to the chance over all positions."""
        if self._fresh_at != self._num_verdicts:
            mean, k = self.mean_rate, self._position_strength
            self._fresh = [_clip((a + k * mean) / (r + k))
                           for a, r in zip(self._shared_accepted, self._shared_reached, strict=True)]
            self._fresh_at = self._num_verdicts
        return self._fresh

    def _rates(self, record: _Record) -> list[float]:
        if record.rates:
            return record.rates
        shared, k = self._shared_rates(), self._position_strength
        mean = self.mean_rate
        # The request's expected passes had it the shared chances: comparing with them removes the effect of depth.
        expected = sum(r * s for r, s in zip(record.reached, shared, strict=True))
        total = sum(record.reached)
        own = _clip((sum(record.accepted) + self._pool_strength * mean) / (total + self._pool_strength))
        same = _clip((expected + self._pool_strength * mean) / (total + self._pool_strength))
        odds_ratio = own / (1.0 - own) * (1.0 - same) / same
        rates = []
        for a, r, s in zip(record.accepted, record.reached, shared, strict=True):
            odds = odds_ratio * s / (1.0 - s)
            rates.append(_clip((a + k * odds / (1.0 + odds)) / (r + k)))
        record.rates = rates
        return rates

    def _learn_margins(self, record: _Record, num_drafted: int, num_accepted: int) -> None:
        reached = min(num_accepted + 1, num_drafted, len(record.margins))
        for j in range(reached):
            margin = record.margins[j]
            if margin is not None:
                self._margins.learn(margin, self._rates(record)[min(j, self.limit - 1)], accepted=j < num_accepted)
        record.margins = []
        record.confidence = 1.0
        record.rates = []


class MarginEvidence:
    """What a draft's margin says about its acceptance, beyond the request's own rate: a log-odds shift per bucket.

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


class PublishedEstimator:
    """arXiv 2609.17943: alpha <- 0.8 alpha + 0.2 a / min(a + 1, d), 1 if all d were accepted; survival = alpha^j.

    Biased low by construction (true 0.90 reads 0.77 at d = 8); kept for comparison.
    """

    def __init__(self, *, initial_rate: float = 0.9, weight: float = 0.2) -> None:
        self._initial_rate = initial_rate
        self._weight = weight
        self._alpha: dict[str, float] = {}
        self._rounds: dict[str, int] = {}

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted, "accepted drafts outside the verified ones"
        self._rounds[request_id] = self._rounds.get(request_id, 0) + 1
        if num_drafted == 0:
            return
        seen = 1.0 if num_accepted == num_drafted else num_accepted / min(num_accepted + 1, num_drafted)
        alpha = self._alpha.get(request_id, self._initial_rate)
        self._alpha[request_id] = (1.0 - self._weight) * alpha + self._weight * seen

    def note_draft(self, request_id: str, margin: float | None) -> None:
        """The published method does not look at margins."""

    def rate(self, request_id: str) -> float:
        """The smoothed alpha."""
        return self._alpha.get(request_id, self._initial_rate)

    def survival(self, request_id: str, length: int) -> Sequence[float]:
        alpha = self.rate(request_id)
        return [alpha ** j for j in range(1, length + 1)]

    def confidence(self, request_id: str) -> float:
        return 1.0

    def rounds(self, request_id: str) -> int:
        return self._rounds.get(request_id, 0)

    def forget(self, request_id: str) -> None:
        self._alpha.pop(request_id, None)
        self._rounds.pop(request_id, None)

    @property
    def mean_rate(self) -> float:
        return sum(self._alpha.values()) / len(self._alpha) if self._alpha else self._initial_rate


def expected_tokens(survival: Sequence[float], length: int) -> float:
    """Tokens a verification of `length` drafts emits on average, the bonus token included."""
    return 1.0 + sum(survival[:length])


def _cumulative(rates: list[float]) -> list[float]:
    result, product = [], 1.0
    for rate in rates:
        product *= rate
        result.append(product)
    return result


def _clip(rate: float) -> float:
    return min(0.999, max(0.001, rate))
