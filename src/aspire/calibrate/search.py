"""Which refresh layers and which budget: greedy growth over measured candidates. Knows nothing of engines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

GAIN = 1.002  # less than that is noise
PATIENCE = 1  # sizes without gain before growth stops: two layers may pay where one does not


@dataclass(frozen=True, slots=True)
class Candidate:
    """refresh: layers, ascending. budget: tokens read in the others."""

    refresh: tuple[int, ...]
    budget: int

    def with_layer(self, layer: int) -> "Candidate":
        return replace(self, refresh=tuple(sorted({*self.refresh, layer})))


Measure = Callable[[Candidate], float | None]  # tokens per second; None: no time left
Forecast = Callable[[Candidate], float]  # what says, unmeasured, which candidates come first


class Search:
    """Measures each candidate once. `rates` keeps what was measured, in order."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self.rates: dict[Candidate, float] = {}
        self.final: dict[Candidate, float] = {}  # rates of those measured again
        self.out_of_time = False

    @property
    def best(self) -> Candidate:
        """The candidate of highest rate, among those measured again if there are any; of equal ones the first."""
        rates = self.final or self.rates
        return max(rates, key=lambda candidate: rates[candidate])

    def try_all(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Measure these; the best of those with a rate, None when there is none."""
        for candidate in candidates:
            if candidate in self.rates or self.out_of_time:
                continue
            rate = self._measure(candidate)
            if rate is None:
                self.out_of_time = True
            else:
                self.rates[candidate] = rate
        known = [candidate for candidate in candidates if candidate in self.rates]
        return max(known, key=lambda candidate: self.rates[candidate]) if known else None

    def grow(self, start: Candidate, places: Sequence[int], *, most: int, promise: Forecast | None = None,
             width: int = 3) -> None:
        """Add the best layer of `places`, one at a time, up to `most`, as long as it pays. promise: measure only the
        `width` most promising of each size."""
        current, misses = self.try_all([start]), 0
        top = self.rates.get(start, 0.0)
        while current is not None and len(current.refresh) < most and misses <= PATIENCE and not self.out_of_time:
            free = [place for place in places if place not in current.refresh]
            larger = [current.with_layer(place) for place in free]
            if promise is not None:
                larger = sorted(larger, key=promise, reverse=True)[:width]
            current = self.try_all(larger)
            if current is None:
                break
            rate = self.rates[current]
            misses = 0 if rate > top * GAIN else misses + 1
            top = max(top, rate)

    def thin(self, candidate: Candidate) -> None:
        """Leave out layers of a candidate, one at a time, as long as it pays."""
        self.try_all([candidate])
        while candidate.refresh and not self.out_of_time:
            fewer = [replace(candidate, refresh=tuple(layer for layer in candidate.refresh if layer != gone))
                     for gone in candidate.refresh]
            best = self.try_all(fewer)
            if best is None or self.rates[best] <= self.rates[candidate]:
                return
            candidate = best

    def confirm(self, measure: Measure, count: int) -> None:
        """Measure the best `count` again, better; they alone are then chosen from, if there is time for two."""
        ranked = sorted(self.rates, key=lambda candidate: -self.rates[candidate])
        for candidate in ranked[:count]:
            rate = measure(candidate)
            if rate is None:
                self.out_of_time = True
                break
            self.rates[candidate] = self.final[candidate] = rate
        if len(self.final) == 1:
            self.final = {}  # nothing to compare it with

    def vary_budget(self, candidate: Candidate, budgets: Sequence[int]) -> None:
        """Climb over budgets from the candidate's own, one step at a time."""
        ordered = sorted({*budgets, candidate.budget})
        for direction in (1, -1):
            place = ordered.index(candidate.budget)
            while 0 <= place + direction < len(ordered) and not self.out_of_time:
                there = replace(candidate, budget=ordered[place + direction])
                if self.try_all([there]) is None or self.rates[there] <= self.rates[candidate]:
                    break
                candidate, place = there, place + direction


def places_of(seeing: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` layers spread over those that see everything; neither the first nor the last, below and above which
    there is nobody to serve."""
    inner = seeing[1:-1]
    if len(inner) <= count:
        return tuple(inner)
    return tuple(sorted({inner[int((index + 0.5) * len(inner) / count)] for index in range(count)}))
