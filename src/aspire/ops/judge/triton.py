"""The shared-noise judge on CUDA: one program per row."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire.ops.locate.values import StepInputs
from aspire.ops.sample.rows import Picks


@triton.jit
def judge_kernel(
    token, margin,  # int64, float32 [N]
    pick_index,  # int32 [R, WIDTH]
    slot_of, drafted_of, decode_of, sparse_of,  # int32 [R]
    tokens,  # int64 [S, WIDTH]
    verdicts,  # int32 [R, WIDTH + 2]
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of + row).to(tl.int64)
    verifies = (tl.load(decode_of + row) != 0) & (tl.load(sparse_of + row) == 0)
    drafted = tl.where(verifies, tl.load(drafted_of + row), 0)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    index = tl.load(pick_index + row * WIDTH + i, mask=inside, other=0)
    pick = tl.load(token + index, mask=inside, other=0)
    used = i < drafted
    draft = tl.load(tokens + slot * WIDTH + 1 + i, mask=used, other=0)
    accepted = tl.minimum(tl.min(tl.where(used & (pick != draft), i, BLOCK), axis=0), drafted)
    share = tl.load(margin + index, mask=inside, other=0.0)
    lost = tl.sum((share != share).to(tl.int32), axis=0) > 0
    shown = tl.where(lost, float("nan"), tl.load(margin + tl.load(pick_index + row * WIDTH)))
    verdict = verdicts + row * (WIDTH + 2)
    tl.store(verdict + i, pick.to(tl.int32), mask=inside)
    tl.store(verdict + WIDTH, accepted)
    tl.store(verdict + WIDTH + 1, shown.to(tl.int32, bitcast=True))


def judge(picks: Picks, inputs: StepInputs, tokens: Tensor) -> Tensor:
    """See reference.py."""
    num_rows, width = inputs.pick_index.shape
    assert tokens.is_contiguous(), "rows follow each other"
    assert inputs.pick_index.is_contiguous(), "rows follow each other"
    verdicts = torch.empty(num_rows, width + 2, dtype=torch.int32, device=tokens.device)
    if num_rows:
        judge_kernel[(num_rows,)](
            picks.token, picks.margin, inputs.pick_index, inputs.slot, inputs.num_drafted, inputs.decode, inputs.sparse,
            tokens, verdicts, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=1)
    return verdicts
