"""Triton kernels of select_topk. Scores are not negative, so their bit patterns ("keys") order as integers.

Rows of up to KEEP units: one program holds a row in registers and finds the k-th best key bit by bit. Longer rows, in
three launches without atomics or zeroed memory, so that the result is the same every time:

1. peaks: the best key of each of GROUPS groups of a row (unit modulo GROUPS, GROUPS at least twice the capacity);
2. keep: the k-th best peak is at most the k-th best key, so units below it are out. Each chunk of a row writes the
   others, of which there are about 1.3 k if scores are not correlated at that stride, at the chunk's own place;
3. choose: one program per row finds the k-th best key among those kept and writes the winners in order.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

import triton
import triton.language as tl

TARGET = ("num_slots", "num_verify", "verify_first", "verify_count", "draft_first", "draft_count", "num_rows")
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
def write_winners(keys, index, bound, spare, written, units_row, places_row, table_row, PER_BLOCK: tl.constexpr):
    """Those above the bound and the first `spare` of those equal to it, after `written` others: (spare, written).
    PER_BLOCK above 0: also where they lie in the cache."""
    equal = (keys == bound).to(tl.int32)
    chosen = (keys > bound) | ((equal != 0) & (tl.cumsum(equal, 0) <= spare))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1 + written
    tl.store(units_row + place, index, mask=chosen)
    if PER_BLOCK > 0:
        block = tl.load(table_row + index // PER_BLOCK, mask=chosen, other=0)
        tl.store(places_row + place, block * PER_BLOCK + index % PER_BLOCK, mask=chosen)
    return spare - tl.minimum(tl.sum(equal, 0), spare), written + tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def write_rest(units_row, num_row, k, CAPACITY: tl.constexpr, CP: tl.constexpr):
    rest = tl.arange(0, CP)
    tl.store(units_row + rest, -1, mask=(rest >= k) & (rest < CAPACITY))
    tl.store(num_row, k)


@triton.jit
def stored_rows(slot_of, n, m, num_slots, num_verify, verify_first, verify_count, draft_first, draft_count, num_rows,
                LISTS: tl.constexpr):
    """The first place among all lists' rows of row n, which is row m of its block, how many lists it sets (they lie
    num_slots places apart), and its slot."""
    if LISTS:
        slot = tl.load(slot_of + m)
        first = tl.where(m < num_verify, verify_first, draft_first) + n // num_rows
        return first * num_slots + slot, tl.where(m < num_verify, verify_count, draft_count), slot
    else:  # noqa: RET505 (one of the two is compiled)
        return n, 1, n


@triton.jit(do_not_specialize=["num_units", *TARGET])
def select_kernel(
    scores,  # float32 [B * N, U]
    first_of, last_of, k_of,  # int [N]
    units,  # int32 [N, CAPACITY], LISTS: [L, S, CAPACITY]
    num,  # int32 [N], LISTS: [L, S]
    slot_of,  # int64 [N], LISTS only, like the next three lines
    places,  # int32 [L, S, CAPACITY], PER_BLOCK only, like the next line
    block_table, table_stride,  # int32 [S, B]
    num_slots, num_verify, verify_first, verify_count, draft_first, draft_count,
    num_rows,  # N, of which `scores` may have several blocks
    coverage, num_units, row_stride,
    CAPACITY: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr, COVERAGE: tl.constexpr, LISTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
):
    """One program per row, which it holds in registers."""
    n = tl.program_id(0).to(tl.int64)
    m = n % num_rows
    place, count, slot = stored_rows(slot_of, n, m, num_slots, num_verify, verify_first, verify_count, draft_first,
                                     draft_count, num_rows, LISTS)
    first, last, k = load_range(first_of, last_of, k_of, m, num_units, CAPACITY)
    if (k == 0) | (count == 0):
        for i in range(count):
            write_rest(units + (place + i * num_slots) * CAPACITY, num + place + i * num_slots, 0, CAPACITY, CP)
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
    spare = k - count_from(keys, bound + 1)
    for i in range(count):
        row = (place + i * num_slots) * CAPACITY
        write_winners(keys, index, bound, spare, 0, units + row, places + row, block_table + slot * table_stride,
                      PER_BLOCK)
        write_rest(units + row, num + place + i * num_slots, k, CAPACITY, CP)


@triton.jit(do_not_specialize=["num_units", "num_rows"])
def peaks_kernel(
    scores, first_of, last_of, k_of,  # as above
    peaks,  # int32 [B * N, GROUPS]: best key of a group; -1: it has no candidate
    mass,  # float32 [B * N, GROUPS]: sum of a group's candidates, with COVERAGE
    num_units, num_rows, row_stride,
    CAPACITY: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, COVERAGE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, last, k = load_range(first_of, last_of, k_of, n % num_rows, num_units, CAPACITY)
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


@triton.jit(do_not_specialize=["num_units", "num_rows"])
def keep_kernel(
    scores, first_of, last_of, k_of, peaks,  # as above
    kept_keys, kept_units,  # int32 [B * N, CHUNKS * CHUNK]
    counts,  # int32 [B * N, CHUNKS]
    num_units, num_rows, row_stride,
    CAPACITY: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    first, last, k = load_range(first_of, last_of, k_of, n % num_rows, num_units, CAPACITY)
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


@triton.jit(do_not_specialize=["num_units", *TARGET])
def choose_kernel(
    first_of, last_of, k_of, mass, kept_keys, kept_units, counts, units, num, slot_of, places,  # as above
    block_table, table_stride, num_slots, num_verify, verify_first, verify_count, draft_first, draft_count, num_rows,
    coverage, num_units,
    CAPACITY: tl.constexpr, CP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, COVERAGE: tl.constexpr, LISTS: tl.constexpr, PER_BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    m = n % num_rows
    place, count, slot = stored_rows(slot_of, n, m, num_slots, num_verify, verify_first, verify_count, draft_first,
                                     draft_count, num_rows, LISTS)
    _, _, k = load_range(first_of, last_of, k_of, m, num_units, CAPACITY)
    if (k == 0) | (count == 0):
        for i in range(count):
            write_rest(units + (place + i * num_slots) * CAPACITY, num + place + i * num_slots, 0, CAPACITY, CP)
        return
    counts_row = counts + n * CHUNKS
    keys_row = kept_keys + n * CHUNKS * CHUNK
    index_row = kept_units + n * CHUNKS * CHUNK
    total = 0
    for chunk in tl.static_range(CHUNKS):
        total += tl.load(counts_row + chunk)
    at = kept_places(counts_row, tl.arange(0, BLOCK), CHUNKS, CHUNK)
    there = tl.arange(0, BLOCK) < total
    keys = tl.load(keys_row + at, mask=there, other=-1)
    index = tl.load(index_row + at, mask=there, other=0)
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
    for i in range(count):
        row = (place + i * num_slots) * CAPACITY
        table_row = block_table + slot * table_stride
        left, written = write_winners(keys, index, bound, spare, 0, units + row, places + row, table_row, PER_BLOCK)
        for start in range(BLOCK, total, BLOCK):
            more = load_kept(keys_row, counts_row, start, total, BLOCK, CHUNKS, CHUNK)
            more_index = load_kept(index_row, counts_row, start, total, BLOCK, CHUNKS, CHUNK)
            left, written = write_winners(more, more_index, bound, left, written, units + row, places + row, table_row,
                                          PER_BLOCK)
        write_rest(units + row, num + place + i * num_slots, k, CAPACITY, CP)
