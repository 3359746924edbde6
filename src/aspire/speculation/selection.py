"""SelectionConfig: which keys a sparse row may read, as numbers. Knows nothing of tensors.

A sparse row reads three ranges of the context: the sinks [0, sinks), the selected units, and the tail
[tail_start, end). `tail_start` is fixed at each verification; the tail then grows with every draft. A unit is
`unit` consecutive tokens at a multiple of `unit`; selected units lie wholly inside [sinks, tail_start).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """budget, floor, sinks and window count tokens; all are multiples of `unit` (checked).

    budget: fixed number of tokens, selected + sinks + window together; 0: only share and floor count.
    share: fraction of the context, at least `floor` tokens, when `budget` is 0.
    coverage: the smallest set of units that holds this share of the attention mass, capped by the budget above.
    reduce: over query heads. queries: how many queries of a verification score, spread from first to last; 0: all.
    merge: "replace": a renewed list comes from the fresh score alone; "mix": fresh score plus `mix` times the score
        that the same layer's last verification gave.
    """

    unit: int = 1
    sinks: int = 4
    window: int = 64
    budget: int = 512
    share: float = 0.0
    floor: int = 0
    coverage: float | None = None
    reduce: Literal["mean", "max"] = "mean"
    queries: int = 2
    merge: Literal["replace", "mix"] = "replace"
    mix: float = 0.5

    def __post_init__(self) -> None:
        _check(self.unit >= 1, "unit", self.unit, "an integer >= 1")
        for name in ("sinks", "window", "budget", "floor"):
            value = getattr(self, name)
            _check(value >= 0 and value % self.unit == 0, name, value, f"a multiple of unit ({self.unit}), >= 0")
        _check(self.window >= 1, "window", self.window, "at least one unit: a row always sees its own token")
        _check(0.0 <= self.share <= 1.0, "share", self.share, "in [0, 1]")
        _check(self.budget > 0 or self.floor > 0 or self.share > 0, "budget", self.budget,
               "positive, unless share or floor is")
        _check(self.coverage is None or 0.0 < self.coverage <= 1.0, "coverage", self.coverage, "in (0, 1], or None")
        _check(self.reduce in ("mean", "max"), "reduce", self.reduce, "mean or max")
        _check(self.queries >= 0, "queries", self.queries, "an integer >= 0")
        _check(self.merge in ("replace", "mix"), "merge", self.merge, "replace or mix")
        _check(self.mix >= 0.0, "mix", self.mix, ">= 0")

    def allowance(self, context: int) -> int:
        """Tokens a row may read of a context of that many: sinks, selected and window together, in whole units."""
        if self.budget > 0:
            return self.budget
        shared = math.ceil(self.share * context / self.unit) * self.unit
        return max(self.floor, shared)

    def num_units(self, context: int) -> int:
        """Units to select for a context of that many tokens; 0 when the whole context is read anyway."""
        if self.tail_start(context) == 0:
            return 0
        # There are that many between sinks and tail, as the context exceeds the allowance, in whole units.
        return max(0, self.allowance(context) - self.sinks - self.window) // self.unit

    def tail_start(self, context: int) -> int:
        """Where the tail begins for a context of that many tokens: a multiple of `unit`; 0 when the budget covers
        the whole context."""
        if context <= max(self.allowance(context), self.sinks + self.window):
            return 0
        return (context - self.window) // self.unit * self.unit

    def tokens_read(self, context: int, num_drafted: int) -> int:
        """Keys a sparse row sees in a layer with a list, its own token included: the selection was made for
        `context` tokens, and the row's token is the one after `num_drafted` more."""
        return context + num_drafted - self.tokens_skipped(context)

    def tokens_skipped(self, context: int) -> int:
        """Keys of a context of that many tokens that a sparse row does not see in a layer with a list."""
        allowance, around, unit = self.budget or self.allowance(context), self.sinks + self.window, self.unit
        if context <= allowance or context <= around:
            return 0
        listed = (allowance - around) // unit if allowance > around else 0
        return ((context - self.window) // unit - listed) * unit - self.sinks

    def capacity(self, max_model_len: int) -> int:
        """As many units as one list ever holds, or a little more; at least 1, so that no tensor is empty."""
        wanted = (self.allowance(max_model_len) - self.sinks - self.window) // self.unit
        return max(1, min(wanted, max_model_len // self.unit))

    def at_unit(self, unit: int) -> "SelectionConfig":
        """The same selection in other units, token counts rounded up to them."""
        def up(tokens: int) -> int:
            return -(-tokens // unit) * unit
        return replace(self, unit=unit, sinks=up(self.sinks), window=up(self.window), budget=up(self.budget),
                       floor=up(self.floor))


def _check(condition: bool, field: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"selection.{field} must be {allowed}, got {value!r}")
