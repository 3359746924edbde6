"""The values an attention backend works on: ragged rows, the lists of sparse rows, the probe of scoring queries.

Letters: T tokens, R rows, P scoring queries, S slots, C list capacity (units), B block-table width.
All tensors live on the model's device; nothing here is read by the host during a step.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class HostRow(NamedTuple):
    """What the host knows of a row without asking the device."""

    slot: int
    num_queries: int
    kv_len: int | None  # None: a decoding row, whose place only the device knows
    num_probed: int  # of its last queries, that a probe may name


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Row r holds query tokens [query_start[r], query_start[r + 1]); its last token sees keys [0, kv_len[r]).

    Query token i of a row with q tokens sits at position kv_len - q + i and sees keys up to and including its own.
    Padding rows have kv_len 0 and no tokens. Rows are either all keys ("full") or restricted ("sparse"): a sparse
    row has one query token and, where the layer gives a list, sees sinks [0, sinks), the listed units and the tail
    [tail_start, kv_len). A backend may plan its work once per object. view: tells apart the objects of one step that
    take different rows for sparse.
    """

    query_start: Tensor  # int32 [R + 1]
    kv_len: Tensor  # int32 [R]
    slot: Tensor  # int32 [R]: row of `block_table`, `units`, `num_units`, `tail_start`
    sparse: Tensor  # bool [R]
    block_table: Tensor  # int32 [S, B]
    tail_start: Tensor  # int32 [S]
    max_query_len: int
    max_kv_len: int  # host's upper bound of kv_len
    host: tuple[HostRow, ...] = ()  # one per row; empty: sizes only, as in a step that is captured
    view: int = 0


@dataclass(frozen=True, slots=True)
class RowSelection:
    """One list of every slot: unit u covers positions [u * unit, (u + 1) * unit). Units ascend.

    places: where each listed unit lies in the cache, its first token's row over unit, which spares a lookup in the
    block table; None: look it up.
    """

    units: Tensor  # int32 [S, C]
    num_units: Tensor  # int32 [S]
    unit: int
    sinks: int
    places: Tensor | None = None  # int32 [S, C]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Per-layer constants: logits = query . key * scale, then soft-capped if asked, then windowed.

    window: number of most recent keys a query sees, its own included (the sliding window of some models); None: all.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    key_scale: float = 1.0  # what a cached key is worth, per unit stored (8-bit caches)
    value_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Probe:
    """Queries whose raw scaled logits over all keys the attention operator writes as it passes.

    N scoring rows of up to Q queries each. token: query-token index, -1 unused. logits: written for keys
    [0, position of the query] (with a window: those inside it), the rest unspecified. Rows that are sparse in this
    layer must not be probed.
    """

    token: Tensor  # int32 [N, Q], distinct where used
    row: Tensor  # int32 [N]: the row that the queries belong to
    logits: Tensor  # [N, Q, H, L], L >= max_kv_len; float32, or bfloat16 on CUDA
