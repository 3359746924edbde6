"""SelectionConfig: which keys a sparse row may read, as numbers. Knows nothing of tensors.

A sparse row reads three ranges of the context: the sinks [0, sinks), the selected units, and the tail
[tail_start, end). `tail_start` is fixed at each verification; the tail then grows with every draft. A unit is
`unit` consecutive tokens at a multiple of `unit`; selected units lie wholly inside [sinks, tail_start).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """budget, floor, sinks and window count tokens; all are multiples of `unit` (checked).

    budget: fixed number of tokens, selected + sinks + window together; 0: only share and floor count.
    share: fraction of the context, at least `floor` tokens, when `budget` is 0.
    coverage: the smallest set of units that holds this share of the attention mass, capped by the budget above.
    reduce: over query heads. queries: how many queries of a verification score, spread from first to last; 0: all.
    merge: "replace": a renewed list comes from the fresh score alone; "mix": fresh score plus `mix` times the
        layer's own verified score.
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

    def num_units(self, context: int) -> int:
        """Units to select for a context of that many tokens; 0 when the whole context is read anyway."""
        raise NotImplementedError

    def tail_start(self, context: int) -> int:
        """Where the tail begins for a context of that many tokens: a multiple of `unit`; 0 when the budget covers
        the whole context."""
        raise NotImplementedError

    def capacity(self, max_model_len: int) -> int:
        """The most units one list ever holds."""
        raise NotImplementedError
