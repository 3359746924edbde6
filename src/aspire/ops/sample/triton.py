"""Sampling on CUDA: the same bits as reference.py. Fits a captured graph: grids depend on shapes, no host waits."""

import torch
import triton
from torch import Tensor

from aspire.ops.sample.kernels import combine_kernel, pick_kernel, threshold_kernel
from aspire.ops.sample.reference import MIN_TEMPERATURE
from aspire.ops.sample.rows import Picks, SamplingRows

PICK_BLOCK = 2048
THRESHOLD_BLOCK = 4096


def sample(logits: Tensor, rows: SamplingRows) -> Picks:
    """See reference.py. A row is split into parts of PICK_BLOCK tokens, whatever the batch."""
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32, "float32 logits"
    assert logits.stride(1) == 1, "rows are contiguous"
    device = logits.device
    token = torch.empty(num_rows, dtype=torch.int64, device=device)
    margin = torch.empty(num_rows, dtype=torch.float32, device=device)
    if not num_rows:
        return Picks(token, margin)
    parts = triton.cdiv(vocab, PICK_BLOCK)
    filtered = rows.mode == "filtered"
    threshold = filter_threshold(logits, rows) if filtered else margin
    best, second = torch.empty(2, num_rows, parts, dtype=torch.float32, device=device)
    winner = torch.empty(num_rows, parts, dtype=torch.int32, device=device)
    pick_kernel[(num_rows, parts)](
        logits, rows.temperature, threshold, rows.seed, rows.position, best, winner, second, logits.stride(0), vocab,
        STREAM=rows.stream, NOISY=rows.mode != "greedy", FILTERED=filtered, BLOCK=PICK_BLOCK, num_warps=4,
        enable_fp_fusion=False)
    combine_kernel[(num_rows,)](best, winner, second, token, margin, parts, BLOCK=triton.next_power_of_2(parts),
                                num_warps=1)
    return Picks(token, margin)


def filter_threshold(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See reference.py; one program per row."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    inverse = 1.0 / torch.where(rows.temperature > 0, rows.temperature, 1.0).clamp(min=MIN_TEMPERATURE)
    threshold_kernel[(num_rows,)](
        logits, rows.temperature, inverse, rows.top_p, rows.min_p, rows.top_k, out, logits.stride(0), vocab,
        BLOCK=min(THRESHOLD_BLOCK, triton.next_power_of_2(vocab)), num_warps=8, enable_fp_fusion=False)
    return out
