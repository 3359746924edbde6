"""The device's part of a step before and after the model: where each token sits, and what the verdict changes.

Pure torch over StepInputs and the slots' state, so that a captured graph can hold all of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.attention.rows import AttentionRows
from aspire.runtime.batch import Batch, StepInputs
from aspire.runtime.cache import SlotState
from aspire.sampling.rows import PickRows


@dataclass(frozen=True, slots=True)
class Located:
    """What the model and the attention need of a step."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T], -1: padding
    rows: AttentionRows
    context: Tensor  # int64 [R] known tokens of each row, drafts left out


def locate(batch: Batch, state: SlotState, tail_start: Tensor) -> Located:
    """Inputs and positions of every token. Decoding rows read them from the slot: a full row starts at its last
    known token, a sparse row holds its last draft (or the last known token before the first draft)."""
    inputs = batch.inputs
    slot, sparse, decode = inputs.slot, inputs.sparse.bool(), inputs.decode.bool()
    drafted_before = torch.where(sparse, inputs.num_drafted, 0)  # [R]
    start = torch.where(decode, state.num_known[slot] - 1 + drafted_before, inputs.start)  # [R]
    kv_len = torch.where(inputs.row_tokens > 0, start + inputs.row_tokens, 0)  # [R]

    row = inputs.token_row  # -1 takes the last row, which is harmless: padding is masked below
    positions = start[row] + inputs.token_offset  # [T]
    column = (inputs.token_offset + drafted_before[row]).clamp(max=state.tokens.shape[1] - 1)
    tokens = torch.where(decode[row], state.tokens[slot[row], column], inputs.token_given)

    block_size = state.block_size
    entry = (positions // block_size).clamp(max=state.block_table.shape[1] - 1)
    mapping = state.block_table[slot[row], entry].long() * block_size + positions % block_size
    rows = AttentionRows(
        query_start=inputs.query_start.int(), kv_len=kv_len.int(), slot=slot.int(), sparse=sparse,
        block_table=state.block_table, tail_start=tail_start,
        max_query_len=batch.shape.max_query_len, max_kv_len=batch.shape.max_kv_len, host=batch.rows,
    )
    context = kv_len - torch.where(sparse | ~decode, 0, inputs.num_drafted)
    return Located(tokens, positions, torch.where(row >= 0, mapping, -1), rows, context)


def settle(inputs: StepInputs, state: SlotState, picks: Tensor, num_accepted: Tensor) -> None:
    """Write the outcome of a step into the slots' state.

    picks: int64 [R, K + 1], row's picks in order. num_accepted: int64 [R].
    Emitting rows: the pick after the accepted drafts becomes the last known token. Drafting rows: the pick joins the
    drafts. Other rows (unfinished prefill, padding) change nothing.
    """
    slot, emits = inputs.slot, inputs.emits.bool()
    bonus = picks.gather(1, num_accepted[:, None])[:, 0]  # [R]
    last = torch.where(emits, bonus, state.tokens[slot, 0])
    state.tokens[slot, 0] = last
    state.num_known[slot] += torch.where(emits, num_accepted + 1, 0)
    drafts = inputs.sparse.bool() & ~emits
    column = torch.where(drafts, inputs.num_drafted + 1, 0)
    state.tokens[slot, column] = torch.where(drafts, picks[:, 0], last)


def pick_rows(inputs: StepInputs, state: SlotState, position: Tensor) -> PickRows:
    """Where each pick stands in its round. position: int64 [N], of the token being chosen."""
    row = inputs.pick_row
    inside = torch.where(inputs.decode[row] == 1, inputs.token_offset[inputs.pick_token], 0)
    drafted_before = torch.where(inputs.sparse[row] == 1, inputs.num_drafted[row], 0)
    return PickRows(inputs.slot[row], position, inside + drafted_before, state.tokens[:, 1:])
