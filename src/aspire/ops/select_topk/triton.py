"""select_topk on CUDA: one program per row finds the k-th best score bit by bit, then writes the winners in order.

Scores are not negative, so their bit patterns order as integers. Rows up to KEEP units stay in registers; longer ones
are read again for every bit.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

import torch
import triton
import triton.language as tl
from torch import Tensor

KEEP = 16384


@triton.jit
def load_keys(scores_row, start, first, last, BLOCK: tl.constexpr):
    """Bit patterns of units [start, start + BLOCK); -1 where not a candidate."""
    index = start + tl.arange(0, BLOCK)
    inside = (index >= first) & (index < last)
    score = tl.load(scores_row + index, mask=inside, other=0.0)
    return tl.where(inside, tl.maximum(score, 0.0).to(tl.int32, bitcast=True), -1)


@triton.jit
def count_from(keys, bound, scores_row, first, last, BLOCK: tl.constexpr, SINGLE: tl.constexpr):
    """Number of candidates whose key is at least `bound`."""
    if SINGLE:
        return tl.sum((keys >= bound).to(tl.int32), 0)
    total = 0
    for start in range(first // BLOCK * BLOCK, last, BLOCK):
        total += tl.sum((load_keys(scores_row, start, first, last, BLOCK) >= bound).to(tl.int32), 0)
    return total


@triton.jit
def mass_from(keys, bound, scores_row, first, last, BLOCK: tl.constexpr, SINGLE: tl.constexpr):
    """Sum of the candidates' scores whose key is at least `bound`."""
    if SINGLE:
        return tl.sum(tl.where(keys >= bound, keys.to(tl.float32, bitcast=True), 0.0), 0)
    total = 0.0
    for start in range(first // BLOCK * BLOCK, last, BLOCK):
        part = load_keys(scores_row, start, first, last, BLOCK)
        total += tl.sum(tl.where(part >= bound, part.to(tl.float32, bitcast=True), 0.0), 0)
    return total


@triton.jit(do_not_specialize=["num_units"])
def select_kernel(
    scores,  # float32 [N, U]
    first_of, last_of, k_of,  # int [N]
    units,  # int32 [N, CAPACITY]
    num,  # int32 [N]
    coverage, num_units, row_stride,
    CAPACITY: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr, COVERAGE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    scores_row = scores + n * row_stride
    first = tl.maximum(tl.load(first_of + n).to(tl.int32), 0)
    last = tl.minimum(tl.load(last_of + n).to(tl.int32), num_units)
    k = tl.minimum(tl.maximum(tl.load(k_of + n).to(tl.int32), 0), CAPACITY)
    k = tl.minimum(k, tl.maximum(last - first, 0))
    keys = load_keys(scores_row, 0, first, last, BLOCK)
    if COVERAGE:
        target = coverage * mass_from(keys, 0, scores_row, first, last, BLOCK, SINGLE)
        bound = 0
        for i in range(31):
            trial = bound | (1 << (30 - i))
            if mass_from(keys, trial, scores_row, first, last, BLOCK, SINGLE) >= target:
                bound = trial
        value = bound.to(tl.float32, bitcast=True)
        above = mass_from(keys, bound + 1, scores_row, first, last, BLOCK, SINGLE)
        more = tl.ceil((target - above) / tl.maximum(value, 1e-38)).to(tl.int32)
        enough = count_from(keys, bound + 1, scores_row, first, last, BLOCK, SINGLE) + tl.maximum(more, 1)
        k = tl.minimum(k, enough)
    bound = 0
    for i in range(31):
        trial = bound | (1 << (30 - i))
        if count_from(keys, trial, scores_row, first, last, BLOCK, SINGLE) >= k:
            bound = trial
    spare = k - count_from(keys, bound + 1, scores_row, first, last, BLOCK, SINGLE)  # of those equal to the bound
    written = 0
    for start in range(0 if SINGLE else first // BLOCK * BLOCK, last, BLOCK):
        if not SINGLE:
            keys = load_keys(scores_row, start, first, last, BLOCK)
        equal = (keys == bound).to(tl.int32)
        equal_rank = tl.cumsum(equal, 0)
        chosen = (keys > bound) | ((equal != 0) & (equal_rank <= spare))
        spare -= tl.minimum(tl.sum(equal, 0), tl.maximum(spare, 0))
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1 + written
        tl.store(units + n * CAPACITY + place, start + tl.arange(0, BLOCK), mask=chosen)
        written += tl.sum(chosen.to(tl.int32), 0)
    rest = tl.arange(0, CP)
    tl.store(units + n * CAPACITY + rest, -1, mask=(rest >= k) & (rest < CAPACITY))
    tl.store(num + n, k)


def select_topk(scores: Tensor, first: Tensor, last: Tensor, k: Tensor, *, capacity: int,
                coverage: float | None) -> tuple[Tensor, Tensor]:
    """See reference.py. With coverage, sums are float32, so the last unit may differ from the reference's."""
    num_rows, num_units = scores.shape
    assert scores.stride(1) == 1, "units are contiguous"
    units = torch.empty(num_rows, capacity, dtype=torch.int32, device=scores.device)
    num = torch.empty(num_rows, dtype=torch.int32, device=scores.device)
    if num_rows == 0:
        return units, num
    single = num_units <= KEEP
    block = triton.next_power_of_2(num_units) if single else min(8192, KEEP)
    select_kernel[(num_rows,)](
        scores, first, last, k, units, num, coverage or 0.0, num_units, scores.stride(0), CAPACITY=capacity,
        CP=triton.next_power_of_2(capacity), BLOCK=block, SINGLE=single, COVERAGE=coverage is not None,
        num_warps=min(16, max(4, block // 1024)))
    return units, num
