"""How likely drafts are to be accepted, per request, learnt from verdicts.

"Survival" of length j = probability that the first j drafts of a round are all accepted; the tokens a verification of
g drafts is expected to emit are then 1 + survival_1 + ... + survival_g.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

from aspire.speculation.margins import MarginEvidence

INITIAL_STRENGTH = 12.0  # reached drafts that the assumed rate is worth
INITIAL_LIKENESS = 200.0  # reached drafts that the shared chances are worth before requests were seen to differ


class AcceptanceEstimator(Protocol):
    """Told every verdict, asked by cadences. A request it never heard of has the shared expectation."""

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """A verification of `num_drafted` drafts accepted the first `num_accepted`. No drafts: a plain step."""
        ...

    def note_draft(self, request_id: str, position: int, margin: float | None) -> None:
        """Draft `position` (from 1) of the running round was made; its best perturbed logit led by `margin`."""
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


class _Counts:
    """Discounted counts per draft position: index j - 1 is position j, `reached` counts trials, `passed` successes.

    Rather than shrinking old counts, new ones weigh more: `unit` is the weight of the newest. `squares` is the sum of
    squared weights of the trials, in units of the newest's.
    """

    __slots__ = ("_memory", "passed", "reached", "squares", "total_passed", "total_reached", "unit")

    def __init__(self, limit: int, memory: float) -> None:
        """memory: tokens after which a count weighs 1/e of a new one."""
        self.reached = [0.0] * limit
        self.passed = [0.0] * limit
        self.total_reached = self.total_passed = 0.0  # over all positions
        self.unit = 1.0
        self.squares = 0.0
        self._memory = memory

    def add(self, num_reached: int, num_passed: int) -> None:
        growth = math.exp((num_passed + 1) / self._memory)
        self.unit *= growth
        self.squares = self.squares / (growth * growth) + num_reached
        if self.unit > 1e9:
            self.reached = [count / self.unit for count in self.reached]
            self.passed = [count / self.unit for count in self.passed]
            self.total_reached, self.total_passed = sum(self.reached), sum(self.passed)
            self.unit = 1.0
        unit = self.unit
        self.total_reached += unit * num_reached
        self.total_passed += unit * num_passed
        self.reached[:num_reached] = [count + unit for count in self.reached[:num_reached]]
        self.passed[:num_passed] = [count + unit for count in self.passed[:num_passed]]


@dataclass(slots=True)
class _Record:
    """What is remembered of one request."""

    counts: _Counts
    rounds: int = 0
    rates: list[float] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)  # of the running round
    confidence: float = 1.0


class _Dispersion:
    """How much requests differ, by the method of moments: a request's passes differ from what the shared chances
    expect by luck (known variance) and by its own nature; the latter's share sets how far requests are shrunk.
    Requests also change within themselves, which the moments cannot tell from sameness: hence the factor of 2.
    """

    def __init__(self) -> None:
        weight = 3 * 40.0**2  # as if 3 requests of 40 drafts had shown the initial strength
        self._excess = weight * 0.09 / (2.0 * INITIAL_LIKENESS)
        self._weight = weight
        self._variance = 0.09 * 3
        self._count = 3.0
        self.strength = INITIAL_LIKENESS  # reached drafts that the shared chances are worth

    def add(self, counts: _Counts, shared: list[float]) -> None:
        reached = counts.total_reached / counts.unit
        expected = sum(map(mul, counts.reached, shared)) / counts.unit
        surprise = counts.total_passed / counts.unit - expected
        mean = expected / reached
        variance = mean * (1.0 - mean)
        keep = 0.998
        self._excess = keep * self._excess + surprise * surprise - counts.squares * variance
        self._weight = keep * self._weight + reached * reached
        self._variance = keep * self._variance + variance
        self._count = keep * self._count + 1.0
        between = max(1e-6, self._excess / self._weight)
        self.strength = min(400.0, max(4.0, self._variance / self._count / (2.0 * between)))


class SurvivalEstimator:
    """Discounted counts per draft position over a shared prior (three levels of shrinkage).

    A verification of length d with a accepted reached positions 1..min(a + 1, d) and passed 1..a; deeper ones are
    unobserved, not failures (the Kaplan-Meier view of censoring). Per request: the chance at position j is
    (P_j + k * prior_j) / (R_j + k), where prior_j is the shared chance at j shifted, in log odds, by how the request
    as a whole compares with the shared chances; that shift in turn shrinks to none, the more the less requests differ
    (empirical Bayes, see `_Dispersion`).
    """

    REFRESH_SHARED = 16  # verdicts between renewals of the shared chances

    def __init__(self, *, limit: int = 16, initial_rate: float = 0.9, memory: float = 100.0,
                 position_strength: float = 100.0, shared_memory: float = 6000.0) -> None:
        """limit: the deepest position counted. memory: tokens of its own after which a request's verdict weighs 1/e;
        shared_memory: tokens of all. position_strength: how many reached drafts a position's prior is worth."""
        if not 0.0 < initial_rate < 1.0:
            raise ValueError(f"initial_rate must be in (0, 1), got {initial_rate!r}")
        if limit < 1:
            raise ValueError(f"limit must be >= 1, got {limit!r}")
        self.limit = limit
        self._memory = memory
        self._dispersion = _Dispersion()
        self._position_strength = position_strength
        self._records: dict[str, _Record] = {}
        self._shared = _Counts(limit, shared_memory)
        self._shared_age = 0
        self._shared_rates = [initial_rate] * limit
        self._initial_rate = initial_rate
        self._margins = MarginEvidence()

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted, "accepted drafts outside the verified ones"
        record = self._record(request_id)
        record.rounds += 1
        if record.margins:
            self._learn_margins(record, num_drafted, num_accepted)
        if num_drafted == 0:
            return
        passed = min(num_accepted, self.limit)
        reached = min(num_accepted + 1, num_drafted, self.limit)
        record.counts.add(reached, passed)
        record.rates, record.survival = [], []
        self._dispersion.add(record.counts, self._shared_rates)
        self._shared.add(reached, passed)
        self._shared_age += 1
        if self._shared_age >= self.REFRESH_SHARED:
            self._renew_shared()

    def note_draft(self, request_id: str, position: int, margin: float | None) -> None:
        record = self._records.get(request_id) or self._record(request_id)
        margins = record.margins
        if len(margins) != position - 1:
            if position <= len(margins):  # a new round began without a verdict (preemption)
                record.confidence = 1.0
            margins[:] = margins[: position - 1] + [None] * (position - 1 - len(margins))
        margins.append(margin)
        if margin is not None:
            rates = record.rates or self._rates(record)
            record.confidence *= self._margins.lift(margin, rates[min(position, self.limit) - 1])

    def survival(self, request_id: str, length: int) -> Sequence[float]:
        assert length <= self.limit, f"survival of {length} drafts asked, {self.limit} counted"
        record = self._records.get(request_id)
        if record is None:
            return list(accumulate(self._shared_rates[:length], mul))
        if not record.survival:
            record.survival = list(accumulate(self._rates(record), mul))
        return record.survival if length == self.limit else record.survival[:length]

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
        counts, k = self._shared, INITIAL_STRENGTH * self._shared.unit
        return (sum(counts.passed) + k * self._initial_rate) / (sum(counts.reached) + k)

    def _record(self, request_id: str) -> _Record:
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record(_Counts(self.limit, self._memory))
        return record

    def _renew_shared(self) -> None:
        """Chance at each position over all requests, shrunk to the chance over all positions."""
        self._shared_age = 0
        mean, k = self.mean_rate, self._position_strength * self._shared.unit
        self._shared_rates = [_clip((p + k * mean) / (r + k))
                              for p, r in zip(self._shared.passed, self._shared.reached, strict=True)]

    def _rates(self, record: _Record) -> list[float]:
        """Chance at each position for one request."""
        if record.rates:
            return record.rates
        shared, counts = self._shared_rates, record.counts
        # How the request compares with the shared chances at the positions it reached, in odds.
        pool = self._dispersion.strength * counts.unit
        total = counts.total_reached + pool
        own = _clip((counts.total_passed + pool * shared[0]) / total)
        same = _clip((sum(map(mul, counts.reached, shared)) + pool * shared[0]) / total)
        ratio = own * (1.0 - same) / (same * (1.0 - own))
        k = self._position_strength * counts.unit
        times, more = k * ratio, ratio - 1.0
        record.rates = [(p + times * s / (1.0 + more * s)) / (r + k)
                        for p, r, s in zip(counts.passed, counts.reached, shared, strict=True)]
        return record.rates

    def _learn_margins(self, record: _Record, num_drafted: int, num_accepted: int) -> None:
        seen = record.margins[: min(num_accepted + 1, num_drafted, self.limit)]
        self._margins.learn(seen, self._rates(record), num_accepted)
        record.margins = []
        record.confidence = 1.0


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

    def note_draft(self, request_id: str, position: int, margin: float | None) -> None:
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


def _clip(rate: float) -> float:
    return min(0.999, max(0.001, rate))
