"""Where simulated acceptance comes from: given curves, regimes that change, and runs recorded on a real model.

Whether a draft is right is a fixed function of (seed, request, position, depth), so that every policy meets the same
luck and a comparison needs few steps.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol


class Curve(Protocol):
    """Acceptance of one request's drafts."""

    def rate(self, position: int, depth: int) -> float:
        """Chance that draft `depth` (from 1) is right, all before being right, when the round began with `position`
        output tokens."""
        ...

    def is_right(self, position: int, depth: int) -> bool:
        """Whether it is."""
        ...


@dataclass(frozen=True, slots=True)
class Rates:
    """Chances by depth (the last one holds for deeper drafts), the same all along the output."""

    by_depth: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.by_depth or not all(0.0 <= rate <= 1.0 for rate in self.by_depth):
            raise ValueError(f"rates must be non-empty and in [0, 1], got {self.by_depth!r}")

    def rate(self, position: int, depth: int) -> float:
        return self.by_depth[min(depth, len(self.by_depth)) - 1]

    def is_right(self, position: int, depth: int) -> bool:
        return luck(self.seed, position + depth) < self.rate(position, depth)


def constant(alpha: float, seed: int = 0) -> Rates:
    return Rates((alpha,), seed)


@dataclass(frozen=True, slots=True)
class Regimes:
    """A curve that changes along the output: `curves[i]` holds from output token `starts[i]` on."""

    starts: tuple[int, ...]
    curves: tuple[Rates, ...]

    def __post_init__(self) -> None:
        if not self.starts or self.starts[0] != 0 or list(self.starts) != sorted(set(self.starts)):
            raise ValueError(f"regime starts must ascend from 0, got {self.starts!r}")
        if len(self.starts) != len(self.curves):
            raise ValueError(f"regimes must have one curve per start ({len(self.starts)}), got {len(self.curves)}")

    def rate(self, position: int, depth: int) -> float:
        return self._at(position).rate(position, depth)

    def is_right(self, position: int, depth: int) -> bool:
        return self._at(position).is_right(position, depth)

    def _at(self, position: int) -> Rates:
        return self.curves[bisect_right(self.starts, position) - 1]


def random_regimes(rng: random.Random, alphas: Sequence[float], mean_length: float, total: int) -> Regimes:
    """Regimes drawn from `alphas`, never the same twice in a row, of exponential lengths."""
    starts, curves, position, last = [], [], 0, -1.0
    while position < total:
        alpha = rng.choice([a for a in alphas if a != last] or list(alphas))
        starts.append(position)
        curves.append(constant(alpha, rng.getrandbits(32)))
        position += 1 + round(rng.expovariate(1.0 / mean_length))
        last = alpha
    return Regimes(tuple(starts), tuple(curves))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Accepted run lengths of successive verifications of a real request, laid along its output and repeated.

    A run of a accepted drafts of a full round (a == limit) says nothing of the token after it: taken as right.
    `rate` is the mean over the runs within `span` tokens, which is what a forecast can know.
    """

    right: tuple[bool, ...]
    span: int = 96

    def rate(self, position: int, depth: int) -> float:
        size = len(self.right)
        first = max(0, position % size - self.span // 2)
        near = self.right[first:first + self.span]
        return (sum(near) + 0.5) / (len(near) + 1.0)

    def is_right(self, position: int, depth: int) -> bool:
        return self.right[(position + depth - 1) % len(self.right)]


def recorded(runs: Sequence[int], limit: int) -> Recorded:
    """Raises ValueError when the runs do not fit the draft length they were recorded at."""
    if not runs or not all(0 <= run <= limit for run in runs):
        raise ValueError(f"runs must be non-empty and in [0, {limit}], got {list(runs)!r}")
    right: list[bool] = []
    for run in runs:
        right += [True] * run + [run == limit]
    return Recorded(tuple(right))


def accepted(curve: Curve, position: int, num_drafted: int) -> int:
    """Drafts of a round of `num_drafted` that are right before the first wrong one."""
    for depth in range(1, num_drafted + 1):
        if not curve.is_right(position, depth):
            return depth - 1
    return num_drafted


def luck(seed: int, position: int) -> float:
    """Uniform in [0, 1), a pure function of its arguments."""
    digest = blake2b(position.to_bytes(8, "little"), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") / 2.0**64
