"""select_topk on CUDA. Scores are not negative, so their bit patterns ("keys") order as integers.

Rows of up to KEEP units: one program holds a row in registers and finds the k-th best key bit by bit. Longer rows, in
three launches without atomics or zeroed memory, so that the result is the same every time:

1. peaks: the best key of each of GROUPS groups of a row (unit modulo GROUPS, GROUPS at least twice the capacity);
2. keep: the k-th best peak is at most the k-th best key, so units below it are out. Each chunk of a row writes the
   others, of which there are about 1.3 k if scores are not correlated at that stride, at the chunk's own place;
3. choose: one program per row finds the k-th best key among those kept and writes the winners in order.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

KEEP = 16384
MOST_GROUPS = 16384  # of rows whose capacity is larger, everything is kept
COLUMNS = 64  # groups of a program
DEPTH = 32  # units of each group that it reads at once
FLOOR_BITS = tl.constexpr(21)  # of the k-th peak; rounding it down keeps a few units more


@triton.jit
def load_range(first_of, last_of, k_of, n, num_units, CAPACITY: tl.constexpr):
    """A row's candidates [first, last) and how many of them to pick."""
    first = tl.maximum(tl.load(first_of + n).to(tl.int32), 0)
    last = tl.minimum(tl.load(last_of + n).to(tl.int32), num_units)
    k = tl.minimum(tl.maximum(tl.load(k_of + n).to(tl.int32), 0), CAPACITY)
    return first, last, tl.minimum(k, tl.maximum(last - first, 0))


@triton.jit
def load_keys(scores_row, index, first, last):
    """Bit patterns of units; -1 where not a candidate. A score that is not a number counts as 0."""
    inside = (index >= first) & (index < last)
    score = tl.load(scores_row + index, mask=inside, other=0.0)
    return tl.where(inside, tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True), -1)


@triton.jit
def sum_from(keys, bound):
    """Sum of the scores whose key is at least `bound`."""
    return tl.sum(tl.where(keys >= bound, keys.to(tl.float32, bitcast=True), 0.0), 0)


@triton.jit
def count_from(keys, bound):
    return tl.sum((keys >= bound).to(tl.int32), 0)


@triton.jit
def count_enough(coverage, mass, above, num_above, value):
    """Units that hold the share `coverage` of `mass`, if those above some key hold `above`, and the rest `value` each.
    """
    more = tl.minimum(tl.ceil((coverage * mass - above) / tl.maximum(value, 1e-38)), 1e9).to(tl.int32)
    return num_above + tl.maximum(more, 1)


@triton.jit
def write_winners(keys, index, bound, spare, written, units_row):
    """Those above the bound and the first `spare` of those equal to it, after `written` others: (spare, written)."""
    equal = (keys == bound).to(tl.int32)
    chosen = (keys > bound) | ((equal != 0) & (tl.cumsum(equal, 0) <= spare))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1 + written
    tl.store(units_row + place, index, mask=chosen)
    return spare - tl.minimum(tl.sum(equal, 0), spare), written + tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def write_rest(units_row, num, n, k, CAPACITY: tl.constexpr, CP: tl.constexpr):
    rest = tl.arange(0, CP)
    tl.store(units_row + rest, -1, mask=(rest >= k) & (rest < CAPACITY))
    tl.store(num + n, k)


@triton.jit(do_not_specialize=["num_units"])
def select_kernel(
    scores,  # float32 [N, U]
    first_of, last_of, k_of,  # int [N]
    units,  # int32 [N, CAPACITY]
    num,  # int32 [N]
    coverage, num_units, row_stride,
    CAPACITY: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr, COVERAGE: tl.constexpr,
):
    """One program per row, which it holds in registers."""
    n = tl.program_id(0).to(tl.int64)
    units_row = units + n * CAPACITY
    first, last, k = load_range(first_of, last_of, k_of, n, num_units, CAPACITY)
    if k == 0:
        write_rest(units_row, num, n, 0, CAPACITY, CP)
        return
    index = tl.arange(0, BLOCK)
    keys = load_keys(scores + n * row_stride, index, first, last)
    if COVERAGE:
        mass = sum_from(keys, 0)
        bound = 0
        for i in range(31):
            trial = bound | (1 << (30 - i))
            if sum_from(keys, trial) >= coverage * mass:
                bound = trial
        k = tl.minimum(k, count_enough(coverage, mass, sum_from(keys, bound + 1), count_from(keys, bound + 1),
                                       bound.to(tl.float32, bitcast=True)))
    bound = 0
    for i in range(31):
        trial = bound | (1 << (30 - i))
        if count_from(keys, trial) >= k:
            bound = trial
    write_winners(keys, index, bound, k - count_from(keys, bound + 1), 0, units_row)
    write_rest(units_row, num, n, k, CAPACITY, CP)


@triton.jit(do_not_specialize=["num_units"])
def peaks_kernel(
    scores, first_of, last_of, k_of,  # as above
    peaks,  # int32 [N, GROUPS]: best key of a group; -1: it has no candidate
    mass,  # float32 [N, GROUPS]: sum of a group's candidates, with COVERAGE
    num_units, row_stride,
    CAPACITY: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, COVERAGE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, last, k = load_range(first_of, last_of, k_of, n, num_units, CAPACITY)
    if k == 0:
        return
    best = tl.full([COLUMNS], -1, tl.int32)
    total = tl.zeros([COLUMNS], tl.float32)
    offset = tl.arange(0, DEPTH)[:, None] * GROUPS + group[None, :]
    for start in range(first // GROUPS * GROUPS, last, GROUPS * DEPTH):
        keys = load_keys(scores + n * row_stride, start + offset, first, last)
        best = tl.maximum(best, tl.max(keys, 0))
        if COVERAGE:
            total += sum_from(keys, 0)
    tl.store(peaks + n * GROUPS + group, best)
    if COVERAGE:
        tl.store(mass + n * GROUPS + group, total)


@triton.jit(do_not_specialize=["num_units"])
def keep_kernel(
    scores, first_of, last_of, k_of, peaks,  # as above
    kept_keys, kept_units,  # int32 [N, CHUNKS * CHUNK]
    counts,  # int32 [N, CHUNKS]
    num_units, row_stride,
    CAPACITY: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    first, last, k = load_range(first_of, last_of, k_of, n, num_units, CAPACITY)
    if k == 0:
        return
    if (chunk * CHUNK >= last) | (chunk * CHUNK + CHUNK <= first):
        tl.store(counts + n * chunks + chunk, 0)
        return
    peak = tl.load(peaks + n * GROUPS + tl.arange(0, GROUPS))
    floor = 0
    for i in range(FLOOR_BITS):
        trial = floor | (1 << (30 - i))
        if count_from(peak, trial) >= k:
            floor = trial
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    keys = load_keys(scores + n * row_stride, index, first, last)
    kept = keys >= floor
    place = (n * chunks + chunk) * CHUNK + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(kept_keys + place, keys, mask=kept)
    tl.store(kept_units + place, index, mask=kept)
    tl.store(counts + n * chunks + chunk, tl.sum(kept.to(tl.int32), 0))


@triton.jit
def kept_places(counts_row, j, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Where the j-th kept unit of a row lies."""
    start = 0
    shift = j * 0
    for chunk in tl.static_range(CHUNKS):
        shift = tl.where(j >= start, chunk * CHUNK - start, shift)
        start += tl.load(counts_row + chunk)
    return j + shift


@triton.jit
def load_kept(kept_row, counts_row, start, total, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    j = start + tl.arange(0, BLOCK)
    return tl.load(kept_row + kept_places(counts_row, j, CHUNKS, CHUNK), mask=j < total, other=-1)


@triton.jit
def count_kept(keys, bound, kept_row, counts_row, total, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
               CHUNK: tl.constexpr):
    """Number of kept units whose key is at least `bound`; `keys` are the first BLOCK, usually all."""
    found = count_from(keys, bound)
    for start in range(BLOCK, total, BLOCK):
        found += count_from(load_kept(kept_row, counts_row, start, total, BLOCK, CHUNKS, CHUNK), bound)
    return found


@triton.jit
def sum_kept(keys, bound, kept_row, counts_row, total, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    found = sum_from(keys, bound)
    for start in range(BLOCK, total, BLOCK):
        found += sum_from(load_kept(kept_row, counts_row, start, total, BLOCK, CHUNKS, CHUNK), bound)
    return found


@triton.jit(do_not_specialize=["num_units"])
def choose_kernel(
    first_of, last_of, k_of, mass, kept_keys, kept_units, counts, units, num, coverage, num_units,  # as above
    CAPACITY: tl.constexpr, CP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, COVERAGE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    units_row = units + n * CAPACITY
    _, _, k = load_range(first_of, last_of, k_of, n, num_units, CAPACITY)
    if k == 0:
        write_rest(units_row, num, n, 0, CAPACITY, CP)
        return
    counts_row = counts + n * CHUNKS
    keys_row = kept_keys + n * CHUNKS * CHUNK
    index_row = kept_units + n * CHUNKS * CHUNK
    total = 0
    for chunk in tl.static_range(CHUNKS):
        total += tl.load(counts_row + chunk)
    place = kept_places(counts_row, tl.arange(0, BLOCK), CHUNKS, CHUNK)
    there = tl.arange(0, BLOCK) < total
    keys = tl.load(keys_row + place, mask=there, other=-1)
    index = tl.load(index_row + place, mask=there, other=0)
    if COVERAGE:
        target = tl.sum(tl.load(mass + n * GROUPS + tl.arange(0, GROUPS)), 0)
        bound = 0
        for i in range(31):
            trial = bound | (1 << (30 - i))
            if sum_kept(keys, trial, keys_row, counts_row, total, BLOCK, CHUNKS, CHUNK) >= coverage * target:
                bound = trial
        above = sum_kept(keys, bound + 1, keys_row, counts_row, total, BLOCK, CHUNKS, CHUNK)
        num_above = count_kept(keys, bound + 1, keys_row, counts_row, total, BLOCK, CHUNKS, CHUNK)
        k = tl.minimum(k, count_enough(coverage, target, above, num_above, bound.to(tl.float32, bitcast=True)))
    bound = 0
    for i in range(31):
        trial = bound | (1 << (30 - i))
        if count_kept(keys, trial, keys_row, counts_row, total, BLOCK, CHUNKS, CHUNK) >= k:
            bound = trial
    spare = k - count_kept(keys, bound + 1, keys_row, counts_row, total, BLOCK, CHUNKS, CHUNK)
    spare, written = write_winners(keys, index, bound, spare, 0, units_row)
    for start in range(BLOCK, total, BLOCK):
        keys = load_kept(keys_row, counts_row, start, total, BLOCK, CHUNKS, CHUNK)
        index = load_kept(index_row, counts_row, start, total, BLOCK, CHUNKS, CHUNK)
        spare, written = write_winners(keys, index, bound, spare, written, units_row)
    write_rest(units_row, num, n, k, CAPACITY, CP)


def select_topk(scores: Tensor, first: Tensor, last: Tensor, k: Tensor, *, capacity: int,
                coverage: float | None) -> tuple[Tensor, Tensor]:
    """See reference.py. With coverage, sums are float32, so the last unit may differ from the reference's."""
    num_rows, num_units = scores.shape
    assert scores.stride(1) == 1, "units are contiguous"
    units = torch.empty(num_rows, capacity, dtype=torch.int32, device=scores.device)
    num = torch.empty(num_rows, dtype=torch.int32, device=scores.device)
    if num_rows == 0:
        return units, num
    sizes = {"CAPACITY": capacity, "CP": triton.next_power_of_2(capacity), "COVERAGE": coverage is not None}
    if num_units > KEEP:
        _select_long(scores, (first, last, k), units, num, coverage or 0.0, sizes)
        return units, num
    block = triton.next_power_of_2(num_units)
    select_kernel[(num_rows,)](
        scores, first, last, k, units, num, coverage or 0.0, num_units, scores.stride(0), BLOCK=block, **sizes,
        num_warps=min(16, max(4, block // 1024)))
    return units, num


def _select_long(scores: Tensor, ranges: tuple[Tensor, Tensor, Tensor], units: Tensor, num: Tensor, coverage: float,
                 sizes: dict[str, Any]) -> None:
    """Rows that do not fit in a program's registers."""
    num_rows, num_units = scores.shape
    capacity, device = units.shape[1], scores.device
    groups = min(MOST_GROUPS, max(COLUMNS, triton.next_power_of_2(2 * capacity)))
    wanted = min(32, max(4, 512 // num_rows))  # chunks of a row: enough programs, which each rank the peaks
    chunk = min(8192, max(512, triton.next_power_of_2(triton.cdiv(num_units, wanted))))
    chunks = triton.cdiv(num_units, chunk)
    block = min(16384, 2 * groups)
    peaks = torch.empty(num_rows, groups, dtype=torch.int32, device=device)
    mass = torch.empty(num_rows, groups if sizes["COVERAGE"] else 1, dtype=torch.float32, device=device)
    kept_keys, kept_units = torch.empty(2, num_rows, chunks * chunk, dtype=torch.int32, device=device)
    counts = torch.empty(num_rows, chunks, dtype=torch.int32, device=device)
    peaks_kernel[(num_rows, groups // COLUMNS)](
        scores, *ranges, peaks, mass, num_units, scores.stride(0), CAPACITY=capacity, GROUPS=groups, COLUMNS=COLUMNS,
        DEPTH=DEPTH, COVERAGE=sizes["COVERAGE"], num_warps=4)
    keep_kernel[(num_rows, chunks)](
        scores, *ranges, peaks, kept_keys, kept_units, counts, num_units, scores.stride(0), CAPACITY=capacity,
        GROUPS=groups, CHUNK=chunk, num_warps=max(4, min(16, max(groups, chunk) // 512)))
    choose_kernel[(num_rows,)](
        *ranges, mass, kept_keys, kept_units, counts, units, num, coverage, num_units, GROUPS=groups, BLOCK=block,
        CHUNKS=chunks, CHUNK=chunk, **sizes, num_warps=max(4, min(16, block // 256)))
