"""The operators of a step outside the attention backend, as one value: reference on the CPU, Triton on CUDA."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from aspire.ops.copy_blocks import reference as copy_blocks_reference
from aspire.ops.copy_blocks.store import BlockStore
from aspire.ops.judge import reference as judge_reference
from aspire.ops.key_scores import reference as key_scores_reference
from aspire.ops.locate import reference as locate_reference
from aspire.ops.locate.values import Located, SlotTables, StepInputs
from aspire.ops.sample import reference as sample_reference
from aspire.ops.sample.rows import Picks, SamplingRows
from aspire.ops.select_topk import reference as select_topk_reference
from aspire.ops.settle import reference as settle_reference


@dataclass(frozen=True, slots=True)
class Operators:
    """Signatures are those of ops/*/reference.py."""

    locate: Callable[[StepInputs, SlotTables], Located]
    key_scores: Callable[..., Tensor]
    select_into: Callable[..., None]
    sample: Callable[[Tensor, SamplingRows], Picks]
    judge: Callable[[Picks, StepInputs, Tensor], Tensor]
    settle: Callable[[StepInputs, SlotTables, Tensor], None]
    copy_blocks: Callable[[BlockStore, Tensor, BlockStore, Tensor], None]


def reference_operators() -> Operators:
    """Plain torch, any device."""
    return Operators(locate_reference.locate, key_scores_reference.key_scores, select_topk_reference.select_into,
                     sample_reference.sample, judge_reference.judge, settle_reference.settle,
                     copy_blocks_reference.copy_blocks)


def triton_operators() -> Operators:
    """Kernels, for CUDA or Triton's interpreter."""
    from aspire.ops.copy_blocks import triton as copy_blocks_triton
    from aspire.ops.judge import triton as judge_triton
    from aspire.ops.key_scores import triton as key_scores_triton
    from aspire.ops.locate import triton as locate_triton
    from aspire.ops.sample import triton as sample_triton
    from aspire.ops.select_topk import triton as select_topk_triton
    from aspire.ops.settle import triton as settle_triton

    return Operators(locate_triton.locate, key_scores_triton.key_scores, select_topk_triton.select_into,
                     sample_triton.sample, judge_triton.judge, settle_triton.settle, copy_blocks_triton.copy_blocks)
