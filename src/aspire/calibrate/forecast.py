"""Tokens per second to expect of a selection, from its measured acceptance and a fitted cost of steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from aspire.simulate.oracle import Stationary, stationary_rate
from aspire.speculation.cost import CostModel

POSITION_STRENGTH = 60.0  # trials that the rate over all positions is worth at each position


@dataclass(frozen=True, slots=True)
class Target:
    """What throughput is maximised for: requests that run together, and the tokens of their contexts."""

    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """draft_length: the best one, at least 1."""

    draft_length: int
    tokens_per_second: float


def smooth_survival(accepted: Sequence[int], reached: Sequence[int]) -> tuple[float, ...]:
    """P(first j drafts all accepted), from counts by position, each position's rate shrunk to the rate over all.

    Raises ValueError without trials.
    """
    if not sum(reached):
        raise ValueError(f"reached must hold trials, got {list(reached)}")
    mean = sum(accepted) / sum(reached)
    rates = [(a + POSITION_STRENGTH * mean) / (r + POSITION_STRENGTH) for a, r in zip(accepted, reached, strict=True)]
    return tuple(accumulate(rates, mul))


def forecast(survival: Sequence[float], target: Target, cost: CostModel) -> Forecast:
    """The best fixed draft length and its rate, verifications spread evenly over the steps."""
    requests = [Stationary(target.context, tuple(survival))] * target.batch
    rate, length = max((stationary_rate(requests, [g] * target.batch, cost), -g)
                       for g in range(1, len(survival) + 1))
    return Forecast(-length, rate)


def plain_rate(target: Target, cost: CostModel) -> float:
    """Tokens per second of plain decoding. Its kernels score nothing: `cost` is without such an overhead."""
    return stationary_rate([Stationary(target.context, ())] * target.batch, [0] * target.batch, cost)


def with_overhead(cost: CostModel, seconds: float) -> CostModel:
    """The same cost with so many seconds more in every step."""
    return replace(cost, base=cost.base + seconds)
