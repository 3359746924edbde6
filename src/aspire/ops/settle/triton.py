"""settle on CUDA: one launch; a slot occurs once, so rows do not meet."""
# mypy: disable-error-code="no-untyped-def, attr-defined"

import triton
import triton.language as tl
from torch import Tensor

from aspire.ops.locate.values import SlotTables, StepInputs

BLOCK = 32


@triton.jit(do_not_specialize=["num_rows"])
def settle_kernel(
    verdicts,  # int32 [R, WIDTH + 2]: picks, accepted, margin
    slot_of, drafted_of, sparse_of, emits_of,  # int32 [R]
    num_known,  # int64 [S]
    tokens,  # int64 [S, WIDTH]
    num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < num_rows
    slot = tl.load(slot_of + row, mask=ok, other=0).to(tl.int64)
    emits = ok & (tl.load(emits_of + row, mask=ok, other=0) != 0)
    drafts = ok & (tl.load(sparse_of + row, mask=ok, other=0) != 0) & (emits == 0)
    verdict = verdicts + row.to(tl.int64) * (WIDTH + 2)
    accepted = tl.load(verdict + WIDTH, mask=emits, other=0)
    pick = tl.load(verdict + accepted, mask=emits | drafts, other=0).to(tl.int64)
    column = tl.load(drafted_of + row, mask=drafts, other=-1) + 1
    tl.store(tokens + slot * WIDTH + column, pick, mask=emits | drafts)
    known = tl.load(num_known + slot, mask=emits, other=0)
    tl.store(num_known + slot, known + accepted + 1, mask=emits)


def settle(inputs: StepInputs, tables: SlotTables, verdicts: Tensor) -> None:
    """See reference.py."""
    num_rows, width = len(inputs.slot), tables.tokens.shape[1]
    assert verdicts.shape == (num_rows, width + 2), "picks, accepted, margin"
    assert verdicts.is_contiguous(), "rows follow each other"
    if num_rows:
        settle_kernel[(triton.cdiv(num_rows, BLOCK),)](
            verdicts, inputs.slot, inputs.num_drafted, inputs.sparse, inputs.emits, tables.num_known, tables.tokens,
            num_rows, WIDTH=width, BLOCK=BLOCK, num_warps=1)
