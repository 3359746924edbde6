"""The same comparison over several seeds: mean shares, and how far the simulator's own luck moves them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIXED = ("fixed", "autoregressive")
CLAIRVOYANT = ("clairvoyant",)


@dataclass(frozen=True, slots=True)
class Share:
    """One policy's rate over another's, seed by seed. error: standard error of the mean, 0 for one seed."""

    mean: float
    error: float
    lowest: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} +- {self.error:.4f}"


def share(rates: Sequence[float], base: Sequence[float]) -> Share:
    """Both sides of a seed meet the same requests and the same luck. Raises ValueError without seeds."""
    if not rates or len(rates) != len(base):
        raise ValueError(f"rates must be as many as the base's {len(base)}, and at least 1, got {len(rates)}")
    ratios = [one / other for one, other in zip(rates, base, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return Share(statistics.fmean(ratios), error, min(ratios))


@dataclass(frozen=True, slots=True)
class Standing:
    """A policy in one scenario. best_fixed: the fixed length of the highest mean rate over the seeds; over_fixed: over
    that one; over_each: over each seed's own best one, which no policy can know: of lengths that are equally good, luck
    makes one look better. of_clairvoyant: of the clairvoyant with the highest mean rate."""

    policy: str
    best_fixed: str
    over_fixed: Share
    over_each: Share
    of_clairvoyant: Share


def standings(rates: Mapping[str, Sequence[float]]) -> list[Standing]:
    """Every policy that is neither a fixed length nor a clairvoyant. rates: tokens a second by policy and seed.

    Raises ValueError when there is no fixed length or no clairvoyant to compare with.
    """
    fixed = {name: values for name, values in rates.items() if name.startswith(FIXED)}
    knowing = {name: values for name, values in rates.items() if name.startswith(CLAIRVOYANT)}
    if not fixed or not knowing:
        raise ValueError(f"policies must hold a fixed length and a clairvoyant to compare with, got {', '.join(rates)}")
    best = max(fixed, key=lambda name: statistics.fmean(fixed[name]))
    seer = max(knowing, key=lambda name: statistics.fmean(knowing[name]))
    each = [max(values) for values in zip(*fixed.values(), strict=True)]
    return [Standing(name, best, share(values, fixed[best]), share(values, each), share(values, knowing[seer]))
            for name, values in rates.items() if name not in fixed and name not in knowing]
