"""Acceptance by a draft's position in its round, counted from the steps of a run. Standard library only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aspire.stats import StepStats

Z = 1.96  # normal quantile of a 95 % interval


@dataclass(frozen=True, slots=True)
class PositionCounts:
    """Index j - 1 is position j. reached: rounds whose drafts before j were all accepted, and that drafted j;
    accepted: of those, how often j was accepted too; drafted: rounds that drafted j at all."""

    drafted: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rate(self) -> float | None:
        """Chance that a draft is accepted given all before it were, over all positions; None without drafts."""
        return sum(self.accepted) / sum(self.reached) if self.reached else None


def count_positions(steps: Sequence[StepStats]) -> PositionCounts:
    """Counts over the verifications of a run."""
    rounds = [(row.num_drafted, row.num_accepted) for stats in steps for row in stats.rows if row.kind == "verify"]
    longest = max((drafted for drafted, _ in rounds), default=0)
    positions = range(1, longest + 1)
    return PositionCounts(
        tuple(sum(drafted >= j for drafted, _ in rounds) for j in positions),
        tuple(sum(drafted >= j and accepted >= j - 1 for drafted, accepted in rounds) for j in positions),
        tuple(sum(accepted >= j for _, accepted in rounds) for j in positions),
    )


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Bounds of a 95 % interval of a proportion (Wilson 1927); the proportion lies inside, rounding or not."""
    if trials == 0:
        return 0.0, 1.0
    rate, spread = successes / trials, Z * Z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = Z * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials)) / (1 + spread)
    return min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half))
