"""Triton kernels of paged_attention: plan a step's work list, attend its items, combine split rows.

Letters: T tokens, R rows, H query heads, KH key heads, G = H / KH, D head dim (DP: padded to a power of two), S slots,
M packed query rows of a tile (TM tokens x G heads), BN keys of a tile, BS tokens of a cache block.

A row's keys form a virtual axis: position for a full row; sinks, listed units, tail for a restricted one. The axis is
cut at fixed places (NUM_FINE pieces of FINE keys, then pieces of COARSE), so the order in which a row's keys are summed
depends on nothing but the place of the key. A piece's result is normalised; pieces are merged in order, by the combine
kernel or, for long query runs, in registers by the same arithmetic. Masked keys and pieces contribute exactly nothing.
The file has more than 300 lines because the three kernels share their geometry.
"""

import triton
import triton.language as tl

NEG = tl.constexpr(-1e30)  # finite, so that differences of two masked values stay finite
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def count_pieces(n, FINE: tl.constexpr, COARSE: tl.constexpr, NUM_FINE: tl.constexpr):
    """Pieces that hold the first n keys of the axis."""
    return tl.where(n <= NUM_FINE * FINE, (n + FINE - 1) // FINE,
                    NUM_FINE + (n - NUM_FINE * FINE + COARSE - 1) // COARSE)


@triton.jit
def piece_start(s, FINE: tl.constexpr, COARSE: tl.constexpr, NUM_FINE: tl.constexpr):
    """First key of piece s."""
    return tl.where(s <= NUM_FINE, s * FINE, NUM_FINE * FINE + (s - NUM_FINE) * COARSE)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "partial_capacity", "list_tokens", "sinks"])
def plan_kernel(
    query_start,  # int32 [R + 1]
    kv_len,  # int32 [R]
    slot_of,  # int32 [R]
    sparse,  # uint8 [R]
    tail_start,  # int32 [S]
    items,  # int32 [max_items, 3]: row, query tile, piece; written here, like the rest below
    tiled_items,  # int32 [max_tiled, 3]: row, query tile, unused
    row_base,  # int32 [R]: first partial of a split row; -1: one piece, written directly; -2: tiled; -3: no tokens
    token_row,  # int32 [T]; -1: of no row
    counters,  # int32 [4]: items, tiled items, ticket, tiled ticket
    num_rows, num_tokens, partial_capacity, list_tokens, sinks,
    RP: tl.constexpr, TM: tl.constexpr, MAX_TILES: tl.constexpr, FINE: tl.constexpr, COARSE: tl.constexpr,
    NUM_FINE: tl.constexpr, RESTRICT: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):
    """One program per row (and one for padding tokens); each finds its own places by a prefix sum over all rows."""
    r = tl.program_id(0)
    rows = tl.arange(0, RP)
    ok = rows < num_rows
    begin = tl.load(query_start + rows, mask=ok, other=0)
    q = tl.load(query_start + rows + 1, mask=ok, other=0) - begin
    n = tl.load(kv_len + rows, mask=ok, other=0)
    active = ok & (q > 0) & (n > 0)
    length = n
    first = rows * 0
    restricted = rows < 0
    if WINDOW > 0:
        first = count_pieces(tl.maximum(n - q + 1 - WINDOW, 0) + 1, FINE, COARSE, NUM_FINE) - 1
    if RESTRICT:
        restricted = active & (tl.load(sparse + rows, mask=ok, other=0) != 0)
        tail = tl.load(tail_start + tl.load(slot_of + rows, mask=ok, other=0), mask=restricted, other=0)
        head = tl.minimum(tl.minimum(tail, sinks), n)
        length = tl.where(restricted, head + tl.minimum(tl.maximum(tail - head, 0), list_tokens) + n - tail, n)
        first = tl.where(restricted, 0, first)
    last = count_pieces(length, FINE, COARSE, NUM_FINE)
    pieces = last - first
    tiles = (q + TM - 1) // TM
    needed = tl.where(active & (tiles <= MAX_TILES) & (pieces > 1), q * pieces, 0)
    base = tl.cumsum(needed, 0) - needed
    listed = active & (tiles <= MAX_TILES) & (base + needed <= partial_capacity)
    coarse = tl.where(listed, tl.maximum(last - tl.maximum(first, NUM_FINE), 0) * tiles, 0)
    fine = tl.where(listed, pieces * tiles, 0) - coarse
    fine_full = tl.where(restricted, 0, fine)
    fine_restricted = fine - fine_full
    tiled = tl.where(active & (listed == 0), tiles, 0)

    # Long items first: a dynamic schedule then ends evenly.
    coarse_at = tl.cumsum(coarse, 0) - coarse
    fine_at = tl.sum(coarse, 0) + tl.where(restricted, tl.sum(fine_full, 0) + tl.cumsum(fine_restricted, 0),
                                           tl.cumsum(fine_full, 0)) - fine
    tiled_at = tl.cumsum(tiled, 0) - tiled
    code = tl.where(active, tl.where(listed, tl.where(pieces > 1, base, -1), -2), -3)
    me = rows == r
    if r == 0:
        tl.store(counters, tl.sum(coarse + fine, 0))
        tl.store(counters + 1, tl.sum(tiled, 0))
        tl.store(counters + 2, 0)
        tl.store(counters + 3, 0)
    my_begin = tl.sum(tl.where(me, begin, 0), 0)
    my_end = tl.sum(tl.where(me, begin + q, 0), 0)
    my_row = r
    if r == num_rows:
        my_begin = tl.load(query_start + num_rows)
        my_end = num_tokens
        my_row = -1
    else:
        tl.store(row_base + r, tl.sum(tl.where(me, code, 0), 0))
    step = tl.arange(0, BLOCK)
    for t in range(my_begin, my_end, BLOCK):
        tl.store(token_row + t + step, my_row, mask=t + step < my_end)
    my_tiles = tl.maximum(tl.sum(tl.where(me, tiles, 0), 0), 1)
    my_last = tl.sum(tl.where(me, last, 0), 0)
    count = tl.sum(tl.where(me, coarse, 0), 0)
    at = tl.sum(tl.where(me, coarse_at, 0), 0)
    for j in range(0, count, BLOCK):
        keep = j + step < count
        place = items + (at + j + step) * 3
        tl.store(place, r, mask=keep)
        tl.store(place + 1, (j + step) % my_tiles, mask=keep)
        tl.store(place + 2, my_last - 1 - (j + step) // my_tiles, mask=keep)
    my_last -= count // my_tiles
    count = tl.sum(tl.where(me, fine, 0), 0)
    at = tl.sum(tl.where(me, fine_at, 0), 0)
    for j in range(0, count, BLOCK):
        keep = j + step < count
        place = items + (at + j + step) * 3
        tl.store(place, r, mask=keep)
        tl.store(place + 1, (j + step) % my_tiles, mask=keep)
        tl.store(place + 2, my_last - 1 - (j + step) // my_tiles, mask=keep)
    count = tl.sum(tl.where(me, tiled, 0), 0)
    at = tl.sum(tl.where(me, tiled_at, 0), 0)
    for j in range(0, count, BLOCK):
        keep = j + step < count
        place = tiled_items + (at + j + step) * 3
        tl.store(place, r, mask=keep)
        tl.store(place + 1, my_tiles - 1 - j - step, mask=keep)


@triton.jit
def merge(acc, total, top, part, part_lse):
    """Add a normalised piece [M, DP] with log2-sum-exp [M] to a running sum: (acc, total, top)."""
    new = tl.maximum(top, part_lse)
    keep = tl.exp2(top - new)
    weight = tl.exp2(part_lse - new)
    return acc * keep[:, None] + part * weight[:, None], total * keep + weight, new


@triton.jit(do_not_specialize=["sinks", "num_probe_rows"])
def attend_kernel(
    query,  # [T, H, D]
    key_cache, value_cache,  # [num_blocks, BS, KH, D]
    query_start, kv_len, slot_of,  # int32 [R + 1], [R], [R]
    sparse,  # uint8 [R]
    tail_start,  # int32 [S]
    block_table,  # int32 [S, B]
    units,  # int32 [S, C]
    num_units,  # int32 [S]
    items, row_base, counters,  # see plan_kernel; items: those of this launch's kind
    out,  # [T, H, D], contiguous
    lse,  # float32 [T, H], natural log
    partial,  # float32 [capacity, H, D]
    partial_lse,  # float32 [capacity, H], base 2
    probe_row,  # int32 [N]
    probe_token,  # int32 [N, PROBE]
    logits,  # [N, PROBE, H, L]
    scale, softcap, value_scale, sinks, num_probe_rows,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, table_stride,
    units_stride, logits_row_stride, logits_query_stride, logits_head_stride,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, TM: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, UNIT: tl.constexpr, FINE: tl.constexpr, COARSE: tl.constexpr,
    NUM_FINE: tl.constexpr, RESTRICT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PROBE: tl.constexpr, PROBE_P: tl.constexpr, NP: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Persistent: programs draw items by ticket. An item is one piece (or, TILED, all pieces) of a query tile."""
    total_items = tl.load(counters + (1 if TILED else 0)) * KH
    ticket = counters + (3 if TILED else 2)
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    d_ok = d < D
    g = m % G
    item = tl.atomic_add(ticket, 1)
    while item < total_items:
        next_item = tl.atomic_add(ticket, 1)  # early, so that its latency is hidden
        kh = item % KH
        place = items + item // KH * 3
        row = tl.load(place)
        tile = tl.load(place + 1)
        begin = tl.load(query_start + row)
        q_len = tl.load(query_start + row + 1) - begin
        n = tl.load(kv_len + row)
        slot = tl.load(slot_of + row).to(tl.int64)
        t = tile * TM + m // G
        row_ok = (m < TM * G) & (t < q_len)
        position = n - q_len + t  # [M]
        seen_end = tl.minimum(n, n - q_len + (tile + 1) * TM)
        row_first = 0
        tile_first = 0
        window_start = 0
        head = 0
        listed = 0
        tail = 0
        if WINDOW > 0:
            row_first = count_pieces(tl.maximum(n - q_len + 1 - WINDOW, 0) + 1, FINE, COARSE, NUM_FINE) - 1
            window_start = tl.maximum(n - q_len + tile * TM + 1 - WINDOW, 0)
            tile_first = count_pieces(window_start + 1, FINE, COARSE, NUM_FINE) - 1
        restricted = False
        if RESTRICT:
            restricted = tl.load(sparse + row) != 0
            if restricted:
                tail = tl.load(tail_start + slot)
                head = tl.minimum(tl.minimum(tail, sinks), n)
                listed = tl.minimum(tl.load(num_units + slot) * UNIT, tl.maximum(tail - head, 0))
                seen_end = head + listed + n - tail
                row_first = 0
                tile_first = 0
                window_start = 0
        offset = (begin + t).to(tl.int64)[:, None] * query_stride + (kh * G + g)[:, None] * query_head_stride + d[None, :]
        qs = tl.load(query + offset, mask=row_ok[:, None] & d_ok[None, :], other=0.0)

        probing = False
        probe_query = m * 0 - 1
        probe_index = 0
        if PROBE > 0:
            if not restricted:
                scoring = tl.arange(0, NP)
                same = tl.load(probe_row + scoring, mask=scoring < num_probe_rows, other=-1) == row
                probe_index = tl.max(tl.where(same, scoring, -1), 0)
                which = tl.arange(0, PROBE_P)
                tokens = tl.load(probe_token + probe_index * PROBE + which, mask=(which < PROBE) & (probe_index >= 0),
                                 other=-1)
                match = (tokens[None, :] == (begin + t)[:, None]) & row_ok[:, None]
                probe_query = tl.max(tl.where(match, which[None, :], -1), 1)
                probing = tl.max(probe_query, 0) >= 0
        logits_at = (probe_index.to(tl.int64) if PROBE > 0 else 0) * logits_row_stride \
            + probe_query.to(tl.int64) * logits_query_stride + (kh * G + g) * logits_head_stride

        if TILED:
            piece = tile_first
            piece_end = count_pieces(seen_end, FINE, COARSE, NUM_FINE)
        else:
            piece = tl.load(place + 2)
            piece_end = piece + 1
        sum_acc = tl.zeros([M, DP] if TILED else [1, 1], tl.float32)
        sum_total = tl.zeros([M] if TILED else [1], tl.float32)
        sum_top = tl.full([M] if TILED else [1], NEG, tl.float32)
        while piece < piece_end:
            low = piece_start(piece, FINE, COARSE, NUM_FINE)
            high = tl.minimum(piece_start(piece + 1, FINE, COARSE, NUM_FINE), seen_end)
            if WINDOW > 0:
                low += tl.maximum(window_start - low, 0) // BN * BN
            if low < high:
                acc = tl.zeros([M, DP], tl.float32)
                total = tl.zeros([M], tl.float32)
                top = tl.full([M], NEG, tl.float32)
                for j in tl.range(low, high, BN, num_stages=STAGES):
                    c = j + tl.arange(0, BN)
                    c_ok = c < high
                    pos = c
                    if RESTRICT:
                        in_list = (c >= head) & (c < head + listed)
                        unit = tl.load(units + slot * units_stride + (c - head) // UNIT, mask=in_list, other=0)
                        pos = tl.where(in_list, unit * UNIT + (c - head) % UNIT,
                                       tl.where(c < head, c, c - head - listed + tail))
                    block = tl.load(block_table + slot * table_stride + pos // BS, mask=c_ok, other=0)
                    physical = block.to(tl.int64) * BS + pos % BS
                    ks = tl.load(key_cache + physical[:, None] * key_stride + kh * key_head_stride + d[None, :],
                                 mask=c_ok[:, None] & d_ok[None, :], other=0.0)
                    x = tl.dot(qs, tl.trans(ks.to(qs.dtype)), input_precision=PRECISION)
                    if SOFTCAP:
                        grown = tl.exp2(x * (scale / softcap * 2 * LOG2E))
                        x = softcap * LOG2E * (1.0 - 2.0 / (grown + 1.0))  # softcap * tanh(x * scale / softcap)
                    else:
                        x = x * (scale * LOG2E)
                    visible = c_ok[None, :] & (pos[None, :] <= position[:, None])
                    if WINDOW > 0:
                        visible = visible & (pos[None, :] > position[:, None] - WINDOW)
                    if PROBE > 0:
                        if probing:
                            tl.store(logits + logits_at[:, None] + pos[None, :],
                                     (x * LN2).to(logits.dtype.element_ty),
                                     mask=visible & (probe_query >= 0)[:, None])
                    x = tl.where(visible, x, NEG)
                    new = tl.maximum(top, tl.max(x, 1))
                    weight = tl.exp2(x - new[:, None])
                    keep = tl.exp2(top - new)
                    total = total * keep + tl.sum(weight, 1)
                    top = new
                    vs = tl.load(value_cache + physical[:, None] * value_stride + kh * value_head_stride + d[None, :],
                                 mask=c_ok[:, None] & d_ok[None, :], other=0.0)
                    acc = tl.dot(weight.to(qs.dtype), vs.to(qs.dtype), acc * keep[:, None], input_precision=PRECISION)
                part = acc / total[:, None]
                part_lse = top + tl.log2(total)
                if TILED:
                    sum_acc, sum_total, sum_top = merge(sum_acc, sum_total, sum_top, part, part_lse)
                else:
                    base = tl.load(row_base + row)
                    if base >= 0:
                        to = (base + (piece - row_first) * q_len + t).to(tl.int64) * (KH * G) + kh * G + g
                        tl.store(partial + to[:, None] * D + d[None, :], part, mask=row_ok[:, None] & d_ok[None, :])
                        tl.store(partial_lse + to, part_lse, mask=row_ok)
                    else:
                        to = (begin + t).to(tl.int64) * (KH * G) + kh * G + g
                        tl.store(out + to[:, None] * D + d[None, :], (part * value_scale).to(out.dtype.element_ty),
                                 mask=row_ok[:, None] & d_ok[None, :])
                        if PROBE > 0:
                            tl.store(lse + to, part_lse * LN2, mask=row_ok)
            piece += 1
        if TILED:
            to = (begin + t).to(tl.int64) * (KH * G) + kh * G + g
            tl.store(out + to[:, None] * D + d[None, :],
                     (sum_acc / sum_total[:, None] * value_scale).to(out.dtype.element_ty),
                     mask=row_ok[:, None] & d_ok[None, :])
            if PROBE > 0:
                tl.store(lse + to, (sum_top + tl.log2(sum_total)) * LN2, mask=row_ok)
        item = next_item


@triton.jit(do_not_specialize=["sinks"])
def combine_kernel(
    query_start, kv_len, slot_of, sparse, tail_start, num_units, row_base, token_row, counters, out, lse, partial,
    partial_lse, value_scale, sinks,  # shapes as in attend_kernel
    KH: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, UNIT: tl.constexpr,
    FINE: tl.constexpr, COARSE: tl.constexpr, NUM_FINE: tl.constexpr, RESTRICT: tl.constexpr, WINDOW: tl.constexpr,
    PROBE: tl.constexpr, UNROLL: tl.constexpr,
):
    """One program per token and key head: merges the pieces of split rows in order; zeros tokens of no row."""
    token = tl.program_id(0)
    kh = tl.program_id(1)
    if (token == 0) & (kh == 0):
        tl.store(counters + 2, 0)
        tl.store(counters + 3, 0)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    ok = (g < G)[:, None] & (d < D)[None, :]
    to = token.to(tl.int64) * (KH * G) + kh * G + g
    row = tl.load(token_row + token)
    if row < 0:
        tl.store(out + to[:, None] * D + d[None, :], tl.zeros([GP, DP], out.dtype.element_ty), mask=ok)
        return
    base = tl.load(row_base + row)
    if base < 0:
        return
    begin = tl.load(query_start + row)
    q_len = tl.load(query_start + row + 1) - begin
    n = tl.load(kv_len + row)
    t = token - begin
    seen_end = n - q_len + t + 1
    first = 0
    if WINDOW > 0:
        first = count_pieces(tl.maximum(n - q_len + 1 - WINDOW, 0) + 1, FINE, COARSE, NUM_FINE) - 1
    if RESTRICT:
        if tl.load(sparse + row) != 0:
            slot = tl.load(slot_of + row)
            tail = tl.load(tail_start + slot)
            head = tl.minimum(tl.minimum(tail, sinks), n)
            listed = tl.minimum(tl.load(num_units + slot) * UNIT, tl.maximum(tail - head, 0))
            seen_end = head + listed + n - tail
            first = 0
    pieces = count_pieces(seen_end, FINE, COARSE, NUM_FINE) - first
    acc = tl.zeros([GP, DP], tl.float32)
    total = tl.zeros([GP], tl.float32)
    top = tl.full([GP], NEG, tl.float32)
    at = (base + t).to(tl.int64) * (KH * G) + kh * G + g
    stride = q_len.to(tl.int64) * (KH * G)
    for s0 in range(0, pieces, UNROLL):
        for u in tl.static_range(UNROLL):
            s = s0 + u
            there = s < pieces
            part_lse = tl.load(partial_lse + at + s * stride, mask=(g < G) & there, other=-2e30)
            part = tl.load(partial + (at + s * stride)[:, None] * D + d[None, :], mask=ok & there, other=0.0)
            acc, total, top = merge(acc, total, top, part, part_lse)
    tl.store(out + to[:, None] * D + d[None, :], (acc / total[:, None] * value_scale).to(out.dtype.element_ty), mask=ok)
    if PROBE > 0:
        tl.store(lse + to, (top + tl.log2(total)) * LN2, mask=g < G)
