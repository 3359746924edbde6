"""From a StepPlan to the tensors of a step: arrays on the host, one packed copy, views on the device.

Padding (for captured graphs) repeats the scratch slot: padded tokens, picks and scoring rows have row -1, padded rows
no tokens.

Hot file: a step's rows become columns once; whatever follows is per batch, not per row or token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aspire.attention.rows import HostRow
from aspire.ops.locate.values import StepInputs
from aspire.runtime.staging import Staging
from aspire.schedule.plan import BlockUpdate, Row, RowKind, StepPlan
from aspire.speculation.layers import renews

Array = NDArray[np.int64]
Packed = NDArray[np.int32]
Arrays = dict[str, Array]  # by field of StepInputs; a field that is left out is all padding

SPARSE = RowKind.SPARSE  # bound once: an enum's look-up is slow
EMPTY: Array = np.zeros(0, dtype=np.int64)
ALIGNMENT = 4  # int32: kernels have variants for addresses that are multiples of 16 bytes and for others


@dataclass(frozen=True, slots=True)
class StepShape:
    """Host-side sizes of a step; a captured graph belongs to one of these."""

    tokens: int
    rows: int
    picks: int
    verify_probes: int
    draft_probes: int
    updates: int
    max_query_len: int
    max_kv_len: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What the device gets, and the host's sizes. rows: empty in a step that is captured, whose rows change."""

    inputs: StepInputs
    shape: StepShape
    rows: tuple[HostRow, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Constants of an engine that shape every batch."""

    draft_limit: int
    scoring_queries: int  # Q; 0: policy without scores
    blocks_per_slot: int
    scratch_slot: int
    scores_drafts: bool  # some layer renews lists from sparse rows
    refresh_every: int = 1  # which drafts do


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the fields of StepInputs lie in the packed tensor of a shape."""

    shape: StepShape
    sizes: tuple[tuple[int, ...], ...]  # by field
    spans: dict[str, tuple[int, int]]  # by field: where it begins and ends
    padding: Packed  # a packed tensor that holds nothing else

    def fill(self, packed: Packed, arrays: Arrays) -> None:
        """Write arrays and padding over all of `packed`."""
        packed[:] = self.padding
        for name, values in arrays.items():
            first, end = self.spans[name]
            assert values.size <= end - first, f"{name}: {values.size} values, {end - first} places"
            packed[first : first + values.size] = values.ravel()
        first, end = self.spans["query_start"]
        packed[first + arrays["query_start"].size : end] = arrays["query_start"][-1]  # padded rows have no tokens

    def views(self, packed: Tensor) -> StepInputs:
        spans = self.spans.values()
        return StepInputs(*(packed[first:end].view(size) for (first, end), size in zip(spans, self.sizes, strict=True)))


def spread_queries(num_tokens: int, window: int, count: int) -> list[int]:
    """`count` offsets spread evenly over the last `window` tokens of a row, first and last included, ascending;
    padded with -1."""
    span = min(num_tokens, window)
    first = num_tokens - span
    if count == 1 or span == 1:
        chosen = [num_tokens - 1]
    else:
        chosen = sorted({first + round(i * (span - 1) / (count - 1)) for i in range(count)})
    return chosen + [-1] * (count - len(chosen))


class BatchBuilder:
    """Turns plans into batches. Holds only constants and the host's side of copies."""

    def __init__(self, layout: BatchLayout, *, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.staging = Staging(device)
        window, queries = layout.draft_limit + 1, layout.scoring_queries
        self._places: Array = np.arange(window)
        # By length: the places of the scoring queries among the last tokens of a row.
        self._spread: Array = np.array([spread_queries(length, window, queries) for length in range(1, window + 1)]
                                       if queries else [[]], dtype=np.int64)
        self._renews: Array = np.array([renews(count, layout.refresh_every) for count in range(window)], dtype=np.int64)

    def build(self, plan: StepPlan) -> Batch:
        """Tensors for a plan, of just its sizes."""
        arrays, shape = self.collect(plan)
        packing = self.packing(shape)
        host = self.staging.claim(len(packing.padding), torch.int32)
        packing.fill(host.numpy(), arrays)
        packed = self.staging.copy(host)
        return Batch(packing.views(packed), shape, tuple(self._host_row(row) for row in plan.rows))

    def _host_row(self, row: Row) -> HostRow:
        layout = self.layout
        if row.kind is RowKind.SPARSE:
            scores = layout.scores_drafts and renews(row.num_drafted, layout.refresh_every)
        else:
            scores = layout.scoring_queries > 0
        return HostRow(row.slot, row.num_tokens, row.start + row.num_tokens if row.tokens else None,
                       min(row.num_tokens, layout.draft_limit + 1) if scores and row.samples else 0)

    def collect(self, plan: StepPlan) -> tuple[Arrays, StepShape]:
        """The plan as arrays by field of StepInputs, and its sizes."""
        arrays = self._rows(plan.rows)
        arrays["update_index"], arrays["update_block"] = self._updates(plan.block_updates)
        row_tokens = arrays["row_tokens"]
        # Under the overlapped loop a decoding row may be a whole round further than the host knows.
        ahead = arrays["decode"] * (self.layout.draft_limit + 1)
        shape = StepShape(
            tokens=arrays["token_row"].size, rows=len(plan.rows), picks=arrays["pick_token"].size,
            verify_probes=arrays["verify_row"].size, draft_probes=arrays["draft_row"].size,
            updates=arrays["update_index"].size, max_query_len=int(row_tokens.max(initial=0)),
            max_kv_len=int((arrays["start"] + row_tokens + ahead).max(initial=0)),
        )
        return arrays, shape

    def _rows(self, rows: Sequence[Row]) -> Arrays:
        """All that follows from the rows."""
        columns = tuple(zip(*rows)) if rows else ((),) * len(Row._fields)  # noqa: B905 (rows are alike)
        _, slot, kind, start, num_tokens, num_drafted, samples, given, emits = columns
        sampled = _column(samples)
        arrays: Arrays = {
            "slot": _column(slot), "start": _column(start), "row_tokens": _column(num_tokens),
            "num_drafted": _column(num_drafted), "decode": _column([not tokens for tokens in given]),
            "sparse": _column([one is SPARSE for one in kind]), "emits": sampled * _column(emits),
        }
        arrays |= _tokens(arrays["row_tokens"])
        if any(given):
            arrays["token_given"] = _column([token for row in rows for token in row.tokens or (0,) * row.num_tokens])
        counts = sampled * np.where(arrays["decode"], arrays["row_tokens"], 1)
        arrays |= _picks(counts, arrays["query_start"], self._places)
        renewing = arrays["sparse"] * self._renews[arrays["num_drafted"]]
        if self.layout.refresh_every > 1:
            arrays["rests"] = arrays["sparse"] - renewing
        arrays["verify_row"] = arrays["draft_row"] = EMPTY
        if self.layout.scoring_queries:
            arrays |= self._verifying(np.flatnonzero(sampled > arrays["sparse"]), arrays)
            if self.layout.scores_drafts:
                arrays["draft_row"] = np.flatnonzero(sampled * renewing)
        return arrays

    def _verifying(self, row: Array, arrays: Arrays) -> Arrays:
        """The scoring queries of full rows that sample. row: their numbers."""
        span = np.minimum(arrays["row_tokens"][row], len(self._spread))
        places = self._spread[span - 1]  # [V, Q] among the last `span` tokens of the row
        first = arrays["query_start"][row + 1] - span
        return {"verify_row": row, "verify_token": np.where(places < 0, -1, first[:, None] + places)}

    def _updates(self, updates: Sequence[BlockUpdate]) -> tuple[Array, Array]:
        index: list[int] = []
        blocks: list[int] = []
        for update in updates:
            base = update.slot * self.layout.blocks_per_slot + update.first
            index += range(base, base + len(update.blocks))
            blocks += update.blocks
        return _column(index), _column(blocks)

    def packing(self, shape: StepShape) -> Packing:
        """For steps of that shape, and for smaller ones that it pads."""
        layout = self.layout
        width, queries = layout.draft_limit + 1, max(1, layout.scoring_queries)
        own: dict[str, tuple[tuple[int, ...], int]] = {
            "token_row": ((shape.tokens,), -1), "token_offset": ((shape.tokens,), 0),
            "token_given": ((shape.tokens,), 0), "query_start": ((shape.rows + 1,), 0),
            "slot": ((shape.rows,), layout.scratch_slot),
            "pick_token": ((shape.picks,), 0), "pick_row": ((shape.picks,), -1),
            "pick_index": ((shape.rows, width), 0),
            "verify_token": ((shape.verify_probes, queries), -1), "verify_row": ((shape.verify_probes,), -1),
            "draft_row": ((shape.draft_probes,), -1),
            "update_index": ((shape.updates,), layout.scratch_slot * layout.blocks_per_slot),
            "update_block": ((shape.updates,), 0),
        }
        places = {f.name: own.get(f.name, ((shape.rows,), 0)) for f in fields(StepInputs)}
        sizes = tuple(size for size, _ in places.values())
        counts = [-(-math.prod(size) // ALIGNMENT) * ALIGNMENT for size in sizes]
        starts = accumulate(counts, initial=0)
        spans = {name: (first, first + math.prod(size))
                 for name, first, size in zip(places, starts, sizes, strict=False)}
        fillers = np.array([filler for _, filler in places.values()], dtype=np.int32)
        return Packing(shape, sizes, spans, fillers.repeat(counts))


def _column(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int64)


def _tokens(row_tokens: Array) -> Arrays:
    """Which row each token is of, and where in it."""
    query_start = np.zeros(row_tokens.size + 1, dtype=np.int64)
    row_tokens.cumsum(out=query_start[1:])
    token_row = np.arange(row_tokens.size).repeat(row_tokens)
    return {"query_start": query_start, "token_row": token_row,
            "token_offset": np.arange(token_row.size) - query_start[token_row]}


def _picks(counts: Array, query_start: Array, places: Array) -> Arrays:
    """The last tokens of rows, counts[r] of row r. places: 0 to the draft limit."""
    end = counts.cumsum()  # in order of picks
    pick_row = np.arange(counts.size).repeat(counts)
    shift = query_start[1:] - end  # from a pick's number to its token's
    first, last = end - counts, end - 1
    index = np.minimum(first[:, None] + places, last[:, None])  # [R, K + 1]
    index[counts == 0] = 0
    return {"pick_row": pick_row, "pick_token": np.arange(pick_row.size) + shift[pick_row], "pick_index": index}
