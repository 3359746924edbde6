"""How much layers choose the same units: a cheap forecast of which refresh layers are worth measuring."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.bench.acceptance import Tally
from aspire.engine import Engine


@dataclass(frozen=True, slots=True)
class Agreement:
    """Among `layers`, ascending, those that keep a list. shared[r][l]: of the units that the l-th one chose at a
    verification, the share that the r-th one chose as well. kept[l]: the share that the l-th one chose again at the
    next verification."""

    layers: tuple[int, ...]
    shared: tuple[tuple[float, ...], ...]
    kept: tuple[float, ...]

    def forecast(self, refresh: Sequence[int]) -> float:
        """Mean share of the units wanted that a draft finds in its lists. A layer above a refresh layer reads what
        that one chose just now; one below all of them what it chose itself, fresh at the beginning of a round and
        `kept` at its end. Refresh layers read everything."""
        total = 0.0
        for index, layer in enumerate(self.layers):
            below = [one for one in refresh if one <= layer]
            if layer in refresh:
                total += 1.0
            elif below:
                total += self.shared[self.layers.index(below[-1])][index]
            else:
                total += 0.5 + 0.5 * self.kept[index]
        return total / len(self.layers)


class ListWatch:
    """Looks at the lists of all layers after each verification of a full batch in lock step. Only for plans without
    refresh layers: there the i-th list is the i-th reading layer's, and nothing but verifications sets it."""

    def __init__(self, engine: Engine, layers: Sequence[int]) -> None:
        runner: object = engine.loop.runner
        self._selection = runner.setup.selection  # type: ignore[attr-defined]
        self._layers = tuple(layers)
        self._before: Tensor | None = None
        self._shared: list[Tensor] = []
        self._kept: list[Tensor] = []

    def look(self, tally: Tally) -> None:
        """After a step; does nothing unless all of it verified."""
        if not tally.steps or tally.steps[-1].kind != "verify":
            return
        chosen = masks(self._selection.units[:, :-1], self._selection.num_units[:, :-1])  # the last slot is scratch
        self._shared.append(shared(chosen, chosen))
        if self._before is not None:
            self._kept.append(shared(self._before, chosen).diagonal())
        self._before = chosen

    def result(self) -> Agreement | None:
        """None before two verifications."""
        if not self._kept:
            return None
        both = torch.stack(self._shared).mean(0).tolist()
        kept = torch.stack(self._kept).mean(0).tolist()
        return Agreement(self._layers, tuple(map(tuple, both)), tuple(kept))


def masks(units: Tensor, num_units: Tensor) -> Tensor:
    """Lists [layers, slots, C] of which the first num_units [layers, slots] count, as 1.0 at the chosen units
    [layers, slots, units]."""
    counts = torch.arange(units.shape[2], device=units.device) < num_units[..., None]
    width = int(units.max()) + 1
    spare = torch.where(counts, units.long(), width)  # one place more, for what does not count
    return torch.zeros(*units.shape[:2], width + 1, device=units.device).scatter_(2, spare, 1.0)[..., :width]


def shared(readers: Tensor, wanted: Tensor) -> Tensor:
    """[r, l]: mean share of the units of wanted[l] that readers[r] hold; both [layers, slots, units]."""
    width = min(readers.shape[2], wanted.shape[2])
    common = torch.einsum("rsu,lsu->rls", readers[..., :width], wanted[..., :width])
    return (common / wanted.sum(2).clamp(min=1.0)).mean(2)
