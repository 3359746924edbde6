"""From a StepPlan to the tensors of a step: host lists, one packed copy, views on the device.

Letters: T tokens, R rows, N picks (token positions whose logits are needed), K draft limit, Q scoring queries a row,
V scoring full rows, D scoring sparse rows, U block-table entries that change. Padding (for captured graphs) repeats
the scratch slot: padded tokens have row -1, padded rows no tokens, padded picks point at token 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from aspire.attention.rows import HostRow
from aspire.schedule.plan import Row, RowKind, StepPlan
from aspire.speculation.layers import renews

Lists = dict[str, list[int]]  # by field of StepInputs


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
class StepInputs:
    """A step's inputs on the device, all int64."""

    token_row: Tensor  # [T]; -1: padding
    token_offset: Tensor  # [T] place inside its row
    token_given: Tensor  # [T] token id where the host knows it (prefill)
    query_start: Tensor  # [R + 1]
    slot: Tensor  # [R]
    start: Tensor  # [R] first position of rows whose position the host knows (prefill)
    row_tokens: Tensor  # [R]
    num_drafted: Tensor  # [R] drafts to verify, or made before this one
    decode: Tensor  # [R] 1: inputs and positions come from the slot's state
    sparse: Tensor  # [R] 1: sparse row
    rests: Tensor  # [R] 1: sparse row that renews no lists, and reads lists in the layers that renew them
    emits: Tensor  # [R] 1: the pick is output
    pick_token: Tensor  # [N] token index
    pick_row: Tensor  # [N]
    pick_index: Tensor  # [R, K + 1] row's picks as indices into N
    verify_token: Tensor  # [V, Q] scoring queries of full rows that sample, -1: unused
    verify_row: Tensor  # [V]
    draft_row: Tensor  # [D]
    update_index: Tensor  # [U] flat index into the block table
    update_block: Tensor  # [U]


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
    """Turns plans into batches. Holds only constants."""

    def __init__(self, layout: BatchLayout, *, device: torch.device) -> None:
        self.layout = layout
        self.device = device

    def build(self, plan: StepPlan) -> Batch:
        """Tensors for a plan, of just its sizes."""
        lists, shape = self.collect(plan)
        packed = self.pack(lists, shape)
        if self.device.type == "cuda":
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        return Batch(self.unpack(packed, shape), shape, tuple(self._host_row(row) for row in plan.rows))

    def _host_row(self, row: Row) -> HostRow:
        layout = self.layout
        if row.kind is RowKind.SPARSE:
            scores = layout.scores_drafts and renews(row.num_drafted, layout.refresh_every)
        else:
            scores = layout.scoring_queries > 0
        return HostRow(row.slot, row.num_tokens, row.start + row.num_tokens if row.tokens else None,
                       min(row.num_tokens, layout.draft_limit + 1) if scores and row.samples else 0)

    def collect(self, plan: StepPlan) -> tuple[Lists, StepShape]:
        """The plan as lists by field of StepInputs, and its sizes."""
        layout = self.layout
        lists: Lists = {f.name: [] for f in fields(StepInputs)}
        lists["query_start"].append(0)
        max_kv = max_query = 0
        for index, row in enumerate(plan.rows):
            first = lists["query_start"][-1]
            lists["query_start"].append(first + row.num_tokens)
            self._add_row(lists, index, row)
            self._add_picks(lists, index, row, first)
            if layout.scoring_queries:
                self._add_probes(lists, index, row, first)
            max_query = max(max_query, row.num_tokens)
            # Under the overlapped loop a decoding row may be a whole round further than the host knows.
            max_kv = max(max_kv, row.start + row.num_tokens + (0 if row.tokens else layout.draft_limit + 1))
        for update in plan.block_updates:
            base = update.slot * layout.blocks_per_slot + update.first
            lists["update_index"] += range(base, base + len(update.blocks))
            lists["update_block"] += update.blocks
        shape = StepShape(
            tokens=len(lists["token_row"]), rows=len(plan.rows), picks=len(lists["pick_token"]),
            verify_probes=len(lists["verify_row"]), draft_probes=len(lists["draft_row"]),
            updates=len(lists["update_index"]), max_query_len=max_query, max_kv_len=max_kv,
        )
        return lists, shape

    def _add_row(self, lists: Lists, index: int, row: Row) -> None:
        lists["token_row"] += [index] * row.num_tokens
        lists["token_offset"] += range(row.num_tokens)
        lists["token_given"] += row.tokens or [0] * row.num_tokens
        lists["slot"].append(row.slot)
        lists["start"].append(row.start)
        lists["row_tokens"].append(row.num_tokens)
        lists["num_drafted"].append(row.num_drafted)
        lists["decode"].append(0 if row.tokens else 1)
        lists["sparse"].append(1 if row.kind is RowKind.SPARSE else 0)
        if self.layout.refresh_every > 1:
            rests = row.kind is RowKind.SPARSE and not renews(row.num_drafted, self.layout.refresh_every)
            lists["rests"].append(1 if rests else 0)
        lists["emits"].append(1 if row.samples and row.emits else 0)

    def _add_picks(self, lists: Lists, index: int, row: Row, first: int) -> None:
        count = 0 if not row.samples else 1 if row.tokens else row.num_tokens
        base = len(lists["pick_token"])
        lists["pick_token"] += range(first + row.num_tokens - count, first + row.num_tokens)
        lists["pick_row"] += [index] * count
        width = self.layout.draft_limit + 1
        picks = list(range(base, base + count)) if count else [0]
        lists["pick_index"] += picks + [picks[-1]] * (width - len(picks))

    def _add_probes(self, lists: Lists, index: int, row: Row, first: int) -> None:
        if not row.samples:
            return
        if row.kind is RowKind.SPARSE:
            if self.layout.scores_drafts and renews(row.num_drafted, self.layout.refresh_every):
                lists["draft_row"].append(index)
            return
        offsets = spread_queries(row.num_tokens, self.layout.draft_limit + 1, self.layout.scoring_queries)
        lists["verify_token"] += [first + o if o >= 0 else -1 for o in offsets]
        lists["verify_row"].append(index)

    def pack(self, lists: Lists, shape: StepShape) -> Tensor:
        """One int64 tensor on the host with all inputs, padded to `shape`."""
        parts: list[Sequence[int]] = []
        for name, (size, filler) in self._sizes(shape).items():
            values, count = lists[name], math.prod(size)
            if name == "query_start":
                filler = values[-1]
            assert len(values) <= count, f"{name}: {len(values)} values do not fit {size}"
            parts += [values, [filler] * (count - len(values))]
        return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]))

    def unpack(self, packed: Tensor, shape: StepShape) -> StepInputs:
        """Views of a packed tensor."""
        sizes = [size for size, _ in self._sizes(shape).values()]
        pieces = torch.split(packed, [math.prod(size) for size in sizes])
        return StepInputs(*(piece.view(size) for piece, size in zip(pieces, sizes, strict=True)))

    def packed_size(self, shape: StepShape) -> int:
        return sum(math.prod(size) for size, _ in self._sizes(shape).values())

    def _sizes(self, shape: StepShape) -> dict[str, tuple[tuple[int, ...], int]]:
        """Shape and filler of every field of StepInputs, in its order."""
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
        return {f.name: own.get(f.name, ((shape.rows,), 0)) for f in fields(StepInputs)}
