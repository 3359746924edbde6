"""What the parts of a step take from the slots and from where everything sits."""

import torch
from torch import Tensor

from aspire.attention.rows import AttentionRows
from aspire.ops.locate.values import Located, SlotTables, StepInputs
from aspire.runtime.batch import Batch
from aspire.runtime.cache import Selection, SlotState
from aspire.runtime.sampling import SlotSampling
from aspire.sampling.rows import PickRows


def slot_tables(state: SlotState, selection: Selection, sampling: SlotSampling) -> SlotTables:
    """The slots' tensors as the operators see them; shared, not copied."""
    return SlotTables(
        num_known=state.num_known, tokens=state.tokens, block_table=state.block_table,
        tail_start=selection.tail_start, quota=selection.quota, temperature=sampling.temperature, top_k=sampling.top_k,
        top_p=sampling.top_p, min_p=sampling.min_p, seed=sampling.seed, tail_of=selection.tail_of,
        quota_of=selection.quota_of, block_size=state.block_size, unit=selection.config.unit,
        first_unit=selection.first_unit)


def attention_rows(batch: Batch, located: Located, tables: SlotTables) -> AttentionRows:
    """The step's rows as attention backends see them; tensors are shared, not copied."""
    return AttentionRows(
        query_start=batch.inputs.query_start, kv_len=located.kv_len, slot=batch.inputs.slot, sparse=located.sparse,
        block_table=tables.block_table, tail_start=tables.tail_start,
        max_query_len=batch.shape.max_query_len, max_kv_len=batch.shape.max_kv_len, host=batch.rows)


def pick_rows(inputs: StepInputs, state: SlotState, position: Tensor) -> PickRows:
    """Where each pick stands in its round. position: int64 [N], of the token being chosen."""
    row = inputs.pick_row
    inside = torch.where(inputs.decode[row] == 1, inputs.token_offset[inputs.pick_token], 0)
    drafted_before = torch.where(inputs.sparse[row] == 1, inputs.num_drafted[row], 0)
    return PickRows(inputs.slot[row].long(), position, (inside + drafted_before).long(), state.tokens[:, 1:])
