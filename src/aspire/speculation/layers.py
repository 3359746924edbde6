"""LayerPlan: which layers a sparse row reads in full, and whose scores renew which selection list.

Refresh layers are data here. "List" = one stored selection of a request (see selection.py); a layer reads at most one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Between = Literal["group", "layer"]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How sparse rows go through the layers, constant for an engine.

    reads[l]: the list a sparse row reads in layer l; None: layer l attends to everything.
    verify_writes[l]: lists set from a full row's scores in layer l.
    draft_writes[l]: lists renewed from a sparse row's scores in layer l (only where reads[l] is None).
    refresh_every: drafts number refresh_every, 2 * refresh_every, ... of a round renew. In the drafts between, a layer
        that renews lists reads the first of them instead of everything; a verification must have set it.
    apply: "same_step": a renewed list serves the layers above in the same step; "next_step": from the next step on.
    tail: who sets a request's tail_start. "verify": every full row that samples (scored or not). "draft": every sparse
        row besides, from its own position: policies that never verify, whose tail would grow without end.
    """

    reads: tuple[int | None, ...]
    verify_writes: tuple[tuple[int, ...], ...]
    draft_writes: tuple[tuple[int, ...], ...]
    num_lists: int
    apply: Literal["same_step", "next_step"] = "same_step"
    tail: Literal["verify", "draft"] = "verify"
    refresh_every: int = 1

    def __post_init__(self) -> None:
        n = len(self.reads)
        assert len(self.verify_writes) == len(self.draft_writes) == n, "one entry per layer"
        for layer, lists in enumerate(self.draft_writes):
            assert not lists or self.reads[layer] is None, f"layer {layer} must read everything to renew lists"
        for lists in (*self.verify_writes, *self.draft_writes, tuple(r for r in self.reads if r is not None)):
            assert all(0 <= index < self.num_lists for index in lists), "list index out of range"
        for lists in (*self.verify_writes, *self.draft_writes):
            assert _in_a_row(lists), "lists that a layer sets are numbered in a row"
        if self.refresh_every > 1:
            chosen = [index for lists in self.verify_writes for index in lists]
            assert all(index in chosen for lists in self.draft_writes for index in lists), "read before it is chosen"
            assert self.tail == "verify", "a list between renewals ends where the tail of its verification begins"

    @property
    def num_layers(self) -> int:
        return len(self.reads)

    @property
    def needs_scores(self) -> bool:
        """Whether a request must have been scored by a full row before it may draft."""
        return any(self.verify_writes)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers in which a sparse row that renews reads the whole context."""
        return tuple(layer for layer, index in enumerate(self.reads) if index is None)

    @property
    def chosen_together(self) -> tuple[int, ...]:
        """Layers that only verifications score, each for one list, numbered in a row: nobody reads these before the
        next step, so all of them may be chosen at once when the step is over."""
        alone = [layer for layer, lists in enumerate(self.verify_writes) if lists and not self.draft_writes[layer]]
        lists = [index for layer in alone for index in self.verify_writes[layer]]
        return tuple(alone) if len(lists) == len(alone) and _in_a_row(lists) else ()

    def reads_between(self, layer: int) -> int | None:
        """What a sparse row that does not renew reads in the layer: a list; None: everything."""
        if self.refresh_every > 1 and self.draft_writes[layer]:
            return self.draft_writes[layer][0]
        return self.reads[layer]


def renews(num_drafted: int, refresh_every: int) -> bool:
    """Whether the draft after that many in its round reads everything in the refresh layers and renews lists."""
    return (num_drafted + 1) % refresh_every == 0


def dense_plan(num_layers: int) -> LayerPlan:
    """Every layer reads everything: plain decoding, and drafts that full attention makes."""
    return LayerPlan((None,) * num_layers, _nothing(num_layers), _nothing(num_layers), 0)


def static_list(num_layers: int, dense: tuple[int, ...] = ()) -> LayerPlan:
    """One list that nobody writes: sinks and tail only (arXiv 2408.11049). `dense` as in `per_layer_lists`."""
    _check_layers("dense", dense, num_layers)
    reads = tuple(None if layer in dense else 0 for layer in range(num_layers))
    return LayerPlan(reads, _nothing(num_layers), _nothing(num_layers), 1)


def per_layer_lists(num_layers: int, refresh: tuple[int, ...] = (), dense: tuple[int, ...] = (), *,
                    refresh_every: int = 1, between: Between = "group") -> LayerPlan:
    """Layers below the first refresh layer each keep a list of their own, chosen at verification. Refresh layer r
    renews one list for all layers above it up to the next refresh layer, in the same step: it does so at every draft,
    before they read, so a verification need not score there. `dense` layers (windowed ones, say) read what they
    always read.

    Where only every `refresh_every`th draft renews, the drafts before read what a verification chose. between:
    "group": the refresh layer's choice, for it and the layers above; "layer": each layer its own, until a renewal sets
    them all.

    Raises ValueError for a layer outside the model or in both tuples.
    """
    if refresh_every > 1:
        return _seldom_renewed(num_layers, refresh, dense, refresh_every=refresh_every, between=between)
    _check_places(refresh, dense, num_layers)
    reads: list[int | None] = []
    verify_writes: list[tuple[int, ...]] = []
    draft_writes: list[tuple[int, ...]] = [()] * num_layers
    below: int | None = None  # the refresh layer whose scores serve this layer
    num_lists = 0
    for layer in range(num_layers):
        if layer in refresh:
            below = layer
        reads_everything = layer in refresh or layer in dense
        if reads_everything:
            reads.append(None)
        elif below is not None:
            if not draft_writes[below]:
                draft_writes[below] = (num_lists,)
                num_lists += 1
            reads.append(draft_writes[below][0])
        else:
            reads.append(num_lists)
            num_lists += 1
        verify_writes.append((num_lists - 1,) if below is None and not reads_everything else ())
    return LayerPlan(tuple(reads), tuple(verify_writes), tuple(draft_writes), num_lists)


def _seldom_renewed(num_layers: int, refresh: tuple[int, ...], dense: tuple[int, ...], *, refresh_every: int,
                    between: Between) -> LayerPlan:
    """See per_layer_lists. Every list is chosen at verification, in the layer that it is numbered after."""
    _check_places(refresh, dense, num_layers)
    reads: list[int | None] = []
    verify_writes: list[tuple[int, ...]] = []
    draft_writes: list[tuple[int, ...]] = [()] * num_layers
    below: int | None = None
    num_lists = 0
    for layer in range(num_layers):
        if layer in refresh:
            below = layer
        if layer in dense:
            reads.append(None)
            verify_writes.append(())
            continue
        if between == "layer" or below is None or below == layer:
            verify_writes.append((num_lists,))
            num_lists += 1
        else:
            verify_writes.append(())
        reads.append(None if below == layer else num_lists - 1)
        if below is not None and verify_writes[-1]:
            draft_writes[below] += verify_writes[-1]
    return LayerPlan(tuple(reads), tuple(verify_writes), tuple(draft_writes), num_lists, refresh_every=refresh_every)


def shared_list(num_layers: int, refresh_layer: int, dense: tuple[int, ...] = (), *,
                refresh_every: int = 1) -> LayerPlan:
    """One list for all layers, scored in `refresh_layer`, which reads everything; serves from the next step on
    (arXiv 2609.17943). `dense` as in `per_layer_lists`."""
    _check_layers("refresh", (refresh_layer,), num_layers)
    _check_layers("dense", dense, num_layers)
    reads = tuple(None if layer == refresh_layer or layer in dense else 0 for layer in range(num_layers))
    writes = tuple((0,) if layer == refresh_layer else () for layer in range(num_layers))
    return LayerPlan(reads, writes, writes, 1, apply="next_step", refresh_every=refresh_every)


def selecting_layers(num_layers: int, selecting: tuple[int, ...], dense: tuple[int, ...] = ()) -> LayerPlan:
    """Each selecting layer reads everything and selects for the layers up to the next one, in the same step
    (arXiv 2510.09883). Layers below the first selecting layer, and `dense` ones, read everything.

    Nothing is verified, so sparse rows move their own tail (`tail="draft"`).
    """
    _check_layers("refresh", selecting, num_layers)
    _check_layers("dense", dense, num_layers)
    reads: list[int | None] = []
    current: int | None = None
    for layer in range(num_layers):
        if layer in selecting:
            current = selecting.index(layer)
        reads.append(None if layer in selecting or layer in dense else current)
    writes = tuple((selecting.index(layer),) if layer in selecting else () for layer in range(num_layers))
    return LayerPlan(tuple(reads), writes, writes, len(selecting), tail="draft")


def _in_a_row(lists: Sequence[int]) -> bool:
    return not lists or list(lists) == list(range(lists[0], lists[0] + len(lists)))


def _nothing(num_layers: int) -> tuple[tuple[int, ...], ...]:
    return ((),) * num_layers


def _check_places(refresh: tuple[int, ...], dense: tuple[int, ...], num_layers: int) -> None:
    _check_layers("refresh", refresh, num_layers)
    _check_layers("dense", dense, num_layers)
    if shared := sorted(set(refresh) & set(dense)):
        raise ValueError(f"refresh layers must not be dense (windowed) layers, got {shared}")


def _check_layers(field: str, layers: tuple[int, ...], num_layers: int) -> None:
    if any(not 0 <= layer < num_layers for layer in layers) or list(layers) != sorted(set(layers)):
        raise ValueError(f"{field} layers must ascend inside [0, {num_layers}), got {list(layers)}")
