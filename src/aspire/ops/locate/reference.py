"""Places of a step's tokens, rows, picks and scoring rows in torch (any device); what must change in the slots before
the first layer changes here."""

import torch
from torch import Tensor

from aspire.ops.locate.values import Located, ScoringRows, SlotTables, StepInputs
from aspire.ops.sample.rows import SamplingRows


def locate(inputs: StepInputs, tables: SlotTables) -> Located:
    """Inputs and positions of every token, from the counts in the slots.

    Decoding rows read them from the slot: a full row starts at its last known token, a sparse row holds its last draft
    (or the last known token before the first draft). Changed in place: block-table entries; tail and quota of the slots
    of emitting rows, for the context that the row makes certain (its drafts left out).
    """
    tables.block_table.view(-1)[inputs.update_index] = inputs.update_block
    slot, sparse, decode = inputs.slot, inputs.sparse.bool(), inputs.decode.bool()
    drafted_before = torch.where(sparse, inputs.num_drafted, 0)  # [R]
    start = torch.where(decode, tables.num_known[slot] - 1 + drafted_before, inputs.start)  # [R]
    kv_len = torch.where(inputs.row_tokens > 0, start + inputs.row_tokens, 0)  # [R]
    _anchor(inputs, tables, kv_len - torch.where(sparse | ~decode, 0, inputs.num_drafted))

    row = inputs.token_row  # -1 takes the last row, which is harmless: padding is masked below
    positions = torch.where(row >= 0, start[row] + inputs.token_offset, 0)  # [T]
    column = (inputs.token_offset + drafted_before[row]).clamp(max=tables.tokens.shape[1] - 1)
    tokens = torch.where(decode[row], tables.tokens[slot[row], column], inputs.token_given.long())
    block_size = tables.block_size
    entry = (positions // block_size).clamp(max=tables.block_table.shape[1] - 1)
    mapping = tables.block_table[slot[row], entry].long() * block_size + positions % block_size
    return Located(torch.where(row >= 0, tokens, 0), positions, torch.where(row >= 0, mapping, -1), kv_len.int(),
                   sparse, inputs.rests.bool(), _picks(inputs, tables, positions), _scoring(inputs, tables),
                   _draft_token(inputs))


def _anchor(inputs: StepInputs, tables: SlotTables, context: Tensor) -> None:
    """context: [R]. Rows that do not emit leave their slot as it is."""
    emits = inputs.emits.bool()
    slot = inputs.slot[emits]
    # A surplus step of the overlapped loop may pass the end.
    context = context[emits].clamp(max=len(tables.tail_of) - 1)
    tables.tail_start[slot] = tables.tail_of[context]
    tables.quota[slot] = tables.quota_of[context]


def _picks(inputs: StepInputs, tables: SlotTables, positions: Tensor) -> SamplingRows:
    real = inputs.pick_row >= 0
    slot = torch.where(real, inputs.slot[inputs.pick_row], tables.scratch)
    position = torch.where(real, positions[inputs.pick_token] + 1, 0)
    return SamplingRows(tables.temperature[slot], tables.top_k[slot], tables.top_p[slot], tables.min_p[slot],
                        tables.seed[slot], position)


def _scoring(inputs: StepInputs, tables: SlotTables) -> ScoringRows:
    row = torch.cat([inputs.verify_row, inputs.draft_row])
    slot = torch.where(row >= 0, inputs.slot[row], tables.scratch).long()
    last = tables.tail_start[slot] // tables.unit
    token = _draft_token(inputs)
    if len(inputs.verify_row):
        spare = inputs.verify_token.shape[1] - 1
        token = torch.cat([inputs.verify_token, torch.nn.functional.pad(token, (0, spare), value=-1)])
    return ScoringRows(token, row, slot, len(inputs.verify_row), torch.full_like(last, tables.first_unit), last,
                       tables.quota[slot])


def _draft_token(inputs: StepInputs) -> Tensor:
    row = inputs.draft_row
    return torch.where(row >= 0, inputs.query_start[row], -1)[:, None]
