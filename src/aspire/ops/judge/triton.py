"""The shared-noise judge on CUDA: one program per row."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def judge_kernel(
    picks,  # int64 [R, K + 1]
    drafts,  # int64 [R, K]
    num_drafted,  # int [R]
    num_accepted,  # int32 [R]
    picks_stride, drafts_stride, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    drafted = tl.load(num_drafted + row).to(tl.int32)
    i = tl.arange(0, BLOCK)
    used = (i < drafted) & (i < LIMIT)
    pick = tl.load(picks + row * picks_stride + i, mask=used, other=0)
    draft = tl.load(drafts + row * drafts_stride + i, mask=used, other=0)
    first_miss = tl.min(tl.where(used & (pick != draft), i, BLOCK), axis=0)
    tl.store(num_accepted + row, tl.minimum(first_miss, drafted))


def judge(picks: Tensor, drafts: Tensor, num_drafted: Tensor) -> Tensor:
    """See reference.py."""
    num_rows, limit = drafts.shape
    assert picks.stride(1) == 1, "rows are contiguous"
    assert limit <= 1 or drafts.stride(1) == 1, "rows are contiguous"
    num_accepted = torch.zeros(num_rows, dtype=torch.int32, device=drafts.device)
    if num_rows and limit:
        judge_kernel[(num_rows,)](picks, drafts, num_drafted, num_accepted, picks.stride(0), drafts.stride(0),
                                  LIMIT=limit, BLOCK=triton.next_power_of_2(limit + 1), num_warps=1)
    return num_accepted
