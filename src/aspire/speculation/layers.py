"""LayerPlan: which layers a sparse row reads in full, and whose scores renew which selection list.

Refresh layers are data here. "List" = one stored selection of a request (see selection.py); a layer reads at most one.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How sparse rows go through the layers, constant for an engine.

    reads[l]: the list a sparse row reads in layer l; None: layer l attends to everything.
    verify_writes[l]: lists set from a full row's scores in layer l.
    draft_writes[l]: lists renewed from a sparse row's scores in layer l (only where reads[l] is None).
    apply: "same_step": a renewed list serves the layers above in the same step; "next_step": from the next step on.
    """

    reads: tuple[int | None, ...]
    verify_writes: tuple[tuple[int, ...], ...]
    draft_writes: tuple[tuple[int, ...], ...]
    num_lists: int
    apply: Literal["same_step", "next_step"] = "same_step"

    def __post_init__(self) -> None:
        n = len(self.reads)
        assert len(self.verify_writes) == n and len(self.draft_writes) == n, "one entry per layer"
        for layer, lists in enumerate(self.draft_writes):
            assert not lists or self.reads[layer] is None, f"layer {layer} must read everything to renew lists"
        for lists in (*self.verify_writes, *self.draft_writes, tuple(r for r in self.reads if r is not None)):
            assert all(0 <= index < self.num_lists for index in lists), "list index out of range"

    @property
    def num_layers(self) -> int:
        return len(self.reads)

    @property
    def needs_scores(self) -> bool:
        """Whether a request must have been scored by a full row before it may draft."""
        return any(self.verify_writes)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers in which a sparse row reads the whole context."""
        return tuple(layer for layer, index in enumerate(self.reads) if index is None)


def per_layer_lists(num_layers: int, refresh: tuple[int, ...] = (), dense: tuple[int, ...] = ()) -> LayerPlan:
    """One list per layer, chosen at verification; refresh layer r renews the lists of the layers above it up to the
    next refresh layer, in the same step. `dense` layers (windowed ones, say) read what they always read.
    """
    raise NotImplementedError


def shared_list(num_layers: int, refresh_layer: int) -> LayerPlan:
    """One list for all layers, scored in `refresh_layer`, which reads everything; serves from the next step on
    (arXiv 2609.17943)."""
    raise NotImplementedError
