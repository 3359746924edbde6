"""locate on CUDA: one launch, whose grid depends on shapes alone. See kernels.py."""

from dataclasses import fields

import torch
import triton
from torch import Tensor

from aspire.ops.locate.kernels import locate_kernel
from aspire.ops.locate.values import Located, ScoringRows, SlotTables, StepInputs
from aspire.ops.sample.rows import SamplingRows

BLOCK = 32
UPDATES = 256  # changes that a program looks through at once


def locate(inputs: StepInputs, tables: SlotTables) -> Located:
    """See reference.py. The outputs are aligned to 16 bytes, so that a kernel has one variant for all of them."""
    assert tables.block_table.numel() < 2**31, "entries of the block table are numbered in int32"
    device = inputs.slot.device
    num_tokens, num_rows, num_picks = len(inputs.token_row), len(inputs.slot), len(inputs.pick_token)
    num_verify, num_draft, num_updates = len(inputs.verify_row), len(inputs.draft_row), len(inputs.update_index)
    queries = inputs.verify_token.shape[1] if num_verify else 1
    num_scoring = num_verify + num_draft
    tokens, positions, mapping = _aligned(3, num_tokens, torch.int64, device)
    kv_len, = _aligned(1, num_rows, torch.int32, device)
    flags = _aligned(2, num_rows, torch.uint8, device)
    position, seed = _aligned(2, num_picks, torch.int64, device)
    temperature, top_p, min_p = _aligned(3, num_picks, torch.float32, device)
    top_k, = _aligned(1, num_picks, torch.int32, device)
    slot, = _aligned(1, num_scoring, torch.int64, device)
    row, first, last, wanted = _aligned(4, num_scoring, torch.int32, device)
    token = torch.empty(num_scoring, queries, dtype=torch.int32, device=device)
    draft_token = torch.empty(num_draft, 1, dtype=torch.int32, device=device)
    programs = sum(triton.cdiv(count, BLOCK) for count in (num_tokens, num_rows, num_picks, num_scoring, num_updates))
    if programs:
        locate_kernel[(programs,)](
            *_tensors(inputs), *_tensors(tables), tokens, positions, mapping, kv_len, *flags, position, temperature,
            top_k, top_p, min_p, seed, token, row, slot, first, last, wanted, draft_token, num_tokens, num_rows,
            num_picks, num_verify, num_draft, num_updates, tables.block_table.shape[1], len(tables.tail_of),
            tables.scratch,
            WIDTH=tables.tokens.shape[1], BLOCK_SIZE=tables.block_size, UNIT=tables.unit, FIRST_UNIT=tables.first_unit,
            Q=queries, QP=triton.next_power_of_2(queries), BLOCK=BLOCK, UPDATES=UPDATES, num_warps=4)
    sparse, rests = (flag.view(torch.bool) for flag in flags)
    picks = SamplingRows(temperature, top_k, top_p, min_p, seed, position)
    return Located(tokens, positions, mapping, kv_len, sparse, rests, picks,
                   ScoringRows(token, row, slot, num_verify, first, last, wanted), draft_token)


def _aligned(count: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """`count` tensors [length], each of which starts at a multiple of 16 bytes."""
    return torch.empty(count, -(-length // 16) * 16, dtype=dtype, device=device)[:, :length].unbind(0)


def _tensors(value: StepInputs | SlotTables) -> list[Tensor]:
    """In the order of the fields, in which the kernel takes them."""
    found = (getattr(value, field.name) for field in fields(value))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]
