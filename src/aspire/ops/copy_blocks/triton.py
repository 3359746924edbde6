"""copy_blocks on CUDA: one launch for all layers, one program for each block and part."""

# mypy: disable-error-code="no-untyped-def, attr-defined"

import torch
import triton
import triton.language as tl
from torch import Tensor

from aspire.ops.copy_blocks.store import BlockStore

BLOCK = 1024  # words a program moves at once


@triton.jit
def copy_kernel(
    source, target,  # int64 [P] addresses
    source_rows, target_rows,  # int64 [N]
    source_stride, target_stride, words, WORD: tl.constexpr, BLOCK: tl.constexpr,
):
    n, part = tl.program_id(0), tl.program_id(1)
    old = tl.load(source + part).to(tl.pointer_type(WORD)) + tl.load(source_rows + n) * source_stride
    new = tl.load(target + part).to(tl.pointer_type(WORD)) + tl.load(target_rows + n) * target_stride
    for first in range(0, words, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(new + i, tl.load(old + i, mask=i < words), mask=i < words)


def copy_blocks(source: BlockStore, source_rows: Tensor, target: BlockStore, target_rows: Tensor) -> None:
    """See reference.py."""
    assert source.words == target.words, "both stores have parts of one size"
    assert source.parts[0].dtype == target.parts[0].dtype, "both stores have one word"
    if len(source_rows) == 0:
        return
    word = tl.int64 if source.parts[0].dtype == torch.int64 else tl.uint8
    copy_kernel[(len(source_rows), len(source.parts))](
        source.addresses, target.addresses, source_rows, target_rows, source.row_stride, target.row_stride,
        source.words, WORD=word, BLOCK=BLOCK, num_warps=4)
