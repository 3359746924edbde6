"""Triton kernels of paged_attention: attend the items of the work list.

Letters: T tokens, R rows, H query heads, KH key heads, G = H / KH, D head dim (DP: padded to a power of two), S slots,
M packed query rows of a tile (TM tokens x G heads), BN keys of a tile, BS tokens of a cache block.

A row's keys form a virtual axis: position for a full row; listed units, sinks, tail for a restricted one. The axis is
cut at fixed places (NUM_FINE pieces of FINE keys, then pieces of coarse_piece, multiples of 16), so the order in which
a row's keys are summed depends on nothing but the place of the key. A piece's result is normalised; pieces are merged
in order, by the combine kernel or, for long query runs, in registers by the same arithmetic. Masked keys and pieces
contribute exactly nothing. A restricted row has pieces of list_piece keys; one whose tail starts at 0 reads everything
and is a full row.
Long because its kernels share their geometry.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

import triton
import triton.language as tl

from aspire.ops.paged_attention.work_list import (
    BASE,
    BEGIN,
    FIELDS,
    KEYS,
    PIECE,
    QUERIES,
    ROW,
    SLOT,
    TAIL,
    TILE,
    count_pieces,
    piece_start,
)

NEG = tl.constexpr(-1e30)  # finite, so that differences of two masked values stay finite
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def merge(acc, total, top, part, part_lse):
    """Add a normalised piece [M, DP] with log2-sum-exp [M] to a running sum: (acc, total, top)."""
    new = tl.maximum(top, part_lse)
    keep = tl.exp2(top - new)
    weight = tl.exp2(part_lse - new)
    return acc * keep[:, None] + part * weight[:, None], total * keep + weight, new


@triton.jit
def store_pairs(row, column, end, values):
    """row[m] + column[n] = bfloat16(values[m, n]) where column < end[m], for even columns and their right neighbours,
    straight from the matrix unit's layout, in which columns 2i and 2i + 1 lie in one register. A plain store would go
    through shared memory that the key buffers need."""
    shape: tl.constexpr = values.shape
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b64 a; setp.lt.s32 p, $3, $5; mad.wide.s32 a, $3, 2, $1; @p st.global.b32 [a], $7; "
        "mov.b32 $0, 0; }", "=r,l,l,r,r,r,r,r",
        [tl.broadcast_to(row.to(tl.int64)[:, None], shape), tl.broadcast_to(column[None, :], shape),
         tl.broadcast_to(end[:, None], shape), values.to(tl.bfloat16)], dtype=tl.int16, is_pure=False, pack=2)


@triton.jit
def store_piece(part, part_lse, out, lse, partial, partial_lse, base, piece, q_len, begin, t, g, row_ok, value_scale,
                kh, KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PROBE: tl.constexpr):
    """A piece's result: the row's own if it has but one (base < 0), else a partial. `piece`: from the row's first."""
    d = tl.arange(0, DP)
    ok = row_ok[:, None] & (d < D)[None, :]
    if base < 0:
        to = (begin + t).to(tl.int64) * (KH * G) + kh * G + g
        tl.store(out + to[:, None] * D + d[None, :], (part * value_scale).to(out.dtype.element_ty), mask=ok)
        if PROBE > 0:
            tl.store(lse + to, part_lse * LN2, mask=row_ok)
    else:
        to = (base + piece * q_len + t).to(tl.int64) * (KH * G) + kh * G + g
        tl.store(partial + to[:, None] * D + d[None, :], part, mask=ok)
        tl.store(partial_lse + to, part_lse, mask=row_ok)


@triton.jit
def attend_tile_of_keys(acc, total, top, qs, x, visible, factor, values, loaded, PRECISION: tl.constexpr):
    """Add a tile of keys to a running sum: (acc, total, top). x: logits over factor, base 2; values: pointers."""
    x = tl.where(visible, x, NEG)
    new = tl.maximum(top, tl.max(x, 1) * factor)
    # Where nothing is visible yet, x * factor - new is the rounding error of a fused product of size 1e29.
    weight = tl.exp2(x * factor - tl.maximum(new, 0.5 * NEG * factor)[:, None])
    keep = tl.exp2(top - new)
    total = total * keep + tl.sum(weight, 1)
    vs = tl.load(values, mask=loaded, other=0.0)
    acc = tl.dot(weight.to(qs.dtype), vs.to(qs.dtype), acc * keep[:, None], input_precision=PRECISION)
    return acc, total, new


@triton.jit
def normalised(acc, total, top):
    """A sum as (values, log2-sum-exp); where nothing is visible, zeros that weigh nothing."""
    total = tl.maximum(total, 1e-30)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def capped(x, scale, softcap, SOFTCAP: tl.constexpr):
    """Logits of products x, and the factor to their base-2 exponent, applied last so that it fuses."""
    factor = scale * LOG2E
    if SOFTCAP:
        grown = tl.exp2(x * (scale / softcap * 2 * LOG2E))
        x = softcap * (1.0 - 2.0 / (grown + 1.0))  # softcap * tanh(x * scale / softcap)
        factor = LOG2E
    return x, factor


@triton.jit
def attend_piece(
    qs,  # [M, DP]
    position,  # int32 [M]
    low, high,  # keys of the row
    key_cache, value_cache,  # at this key head
    table,  # int32 [B]: this slot's
    logits_row,  # [M] pointers to the probed logits of a packed query row
    probed,  # bool [M]
    probing, scale, softcap, key_stride, value_stride,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PROBE: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """Normalised attention of a query tile to keys [low, high): (float32 [M, DP], log2-sum-exp [M])."""
    d = tl.arange(0, DP)
    acc = tl.zeros([M, DP], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], NEG, tl.float32)
    for j in tl.range(low, high, BN, num_stages=STAGES):
        c = j + tl.arange(0, BN)
        c_ok = c < high
        block = tl.load(table + c // BS, mask=c_ok, other=0)
        physical = block.to(tl.int64) * BS + c % BS
        loaded = c_ok[:, None]
        if DP > D:
            loaded = loaded & (d < D)[None, :]
        ks = tl.load(key_cache + physical[:, None] * key_stride + d[None, :], mask=loaded, other=0.0)
        x = tl.dot(qs, tl.trans(ks.to(qs.dtype)), input_precision=PRECISION)
        x, factor = capped(x, scale, softcap, SOFTCAP)
        if PROBE:  # noqa: SIM102 (known at compile time, probing is not)
            if probing:
                if DIRECT:
                    store_pairs(logits_row, c, tl.where(probed, high, 0), x * (factor * LN2))
                else:
                    tl.store(logits_row[:, None] + c[None, :], (x * (factor * LN2)).to(logits_row.dtype.element_ty),
                             mask=probed[:, None] & c_ok[None, :])
        visible = c[None, :] <= tl.minimum(position, high - 1)[:, None]
        if WINDOW > 0:
            visible = visible & (c[None, :] > position[:, None] - WINDOW)
        values = value_cache + physical[:, None] * value_stride + d[None, :]
        acc, total, top = attend_tile_of_keys(acc, total, top, qs, x, visible, factor, values, loaded, PRECISION)
    return normalised(acc, total, top)


@triton.jit
def attend_keys(
    acc, total, top, qs, physical, seen, key_cache, value_cache, scale, softcap, key_stride, value_stride,
    D: tl.constexpr, DP: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add keys at cache rows `physical` [BN], where seen [BN], to a running sum: (acc, total, top)."""
    d = tl.arange(0, DP)
    loaded = seen[:, None]
    if DP > D:
        loaded = loaded & (d < D)[None, :]
    ks = tl.load(key_cache + physical[:, None] * key_stride + d[None, :], mask=loaded, other=0.0)
    x = tl.dot(qs, tl.trans(ks.to(qs.dtype)), input_precision=PRECISION)
    x, factor = capped(x, scale, softcap, SOFTCAP)
    return attend_tile_of_keys(acc, total, top, qs, x, seen[None, :], factor,
                               value_cache + physical[:, None] * value_stride + d[None, :], loaded, PRECISION)


@triton.jit
def attend_listed(
    query, key_cache, value_cache, table, units, num_units, out, lse, partial, partial_lse,  # as in attend_piece
    begin, q_len, n, tail, base, piece, list_piece, kh, scale, softcap, value_scale, sinks, query_stride,
    query_head_stride, key_stride, value_stride, KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, MS: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PROBE: tl.constexpr, TILED: tl.constexpr, PLACES: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One piece of a restricted row, which has one query. units: int32 [C] of this slot; PLACES: where they lie."""
    d = tl.arange(0, DP)
    m = tl.arange(0, MS)
    t = m // G
    g = m % G
    row_ok = m < G
    offset = (begin + t).to(tl.int64) * query_stride + (kh * G + g) * query_head_stride
    qs = tl.load(query + offset[:, None] + d[None, :], mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    head = tl.minimum(tl.minimum(tail, sinks), n)
    listed = tl.minimum(tl.load(num_units) * UNIT, tl.maximum(tail - head, 0))
    low = tl.multiple_of(piece * list_piece, 16)
    high = tl.minimum(low + list_piece, listed + head + n - tail)
    if TILED:  # the row's partials did not fit
        low = 0
        high = listed + head + n - tail
    acc = tl.zeros([MS, DP], tl.float32)
    total = tl.zeros([MS], tl.float32)
    top = tl.full([MS], NEG, tl.float32)
    # The list, then the keys around it: one lookup before the keys in either loop, so that many tiles are in flight.
    list_end = tl.minimum(high, listed)
    for j in tl.range(low, list_end, BN, num_stages=STAGES):
        c = j + tl.arange(0, BN)
        seen = c < list_end
        unit = tl.load(units + c // UNIT, mask=seen, other=0)
        physical = unit.to(tl.int64) * UNIT + c % UNIT
        if PLACES == 0:
            pos = unit * UNIT + c % UNIT
            physical = tl.load(table + pos // BS, mask=seen, other=0).to(tl.int64) * BS + pos % BS
            if WINDOW > 0:
                seen = seen & (pos > n - 1 - WINDOW)
        acc, total, top = attend_keys(acc, total, top, qs, physical, seen, key_cache, value_cache, scale, softcap,
                                      key_stride, value_stride, D, DP, SOFTCAP, PRECISION)
    for j in tl.range(tl.maximum(low, listed), high, BN, num_stages=STAGES):
        c = j + tl.arange(0, BN) - listed
        seen = c < high - listed
        pos = tl.where(c < head, c, c - head + tail)
        physical = tl.load(table + pos // BS, mask=seen, other=0).to(tl.int64) * BS + pos % BS
        if WINDOW > 0:
            seen = seen & (pos > n - 1 - WINDOW)
        acc, total, top = attend_keys(acc, total, top, qs, physical, seen, key_cache, value_cache, scale, softcap,
                                      key_stride, value_stride, D, DP, SOFTCAP, PRECISION)
    # A list shorter than it may be leaves pieces without keys.
    part, part_lse = normalised(acc, total, top)
    store_piece(part, part_lse, out, lse, partial, partial_lse, base, piece, q_len, begin, t, g, row_ok,
                value_scale, kh, KH, G, D, DP, PROBE)


@triton.jit
def attend_tile(
    query, key_cache, value_cache, table, out, lse, partial, partial_lse, probe_row, probe_token, logits,
    row, tile, begin, q_len, n, base, piece, coarse_piece, kh, scale, softcap, value_scale, num_probe_rows,
    query_stride, query_head_stride, key_stride, value_stride, logits_row_stride, logits_query_stride,
    logits_head_stride, KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
    TM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, FINE: tl.constexpr, NUM_FINE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PROBE: tl.constexpr, PROBE_P: tl.constexpr, NP: tl.constexpr,
    DIRECT: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """One piece (TILED: all pieces) of a tile of a full row's queries."""
    d = tl.arange(0, DP)
    m = tl.arange(0, M)
    t = tile * TM + m // G
    g = m % G
    row_ok = (m < TM * G) & (t < q_len)
    position = n - q_len + t  # [M]
    seen_end = tl.minimum(n, n - q_len + (tile + 1) * TM)
    row_first = 0
    tile_first = 0
    window_start = 0
    if WINDOW > 0:
        row_first = count_pieces(tl.maximum(n - q_len + 1 - WINDOW, 0) + 1, coarse_piece, FINE, NUM_FINE) - 1
        window_start = tl.maximum(n - q_len + tile * TM + 1 - WINDOW, 0)
        tile_first = count_pieces(window_start + 1, coarse_piece, FINE, NUM_FINE) - 1
    offset = (begin + t).to(tl.int64) * query_stride + (kh * G + g) * query_head_stride
    qs = tl.load(query + offset[:, None] + d[None, :], mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    probing = False
    probed = row_ok
    logits_row = logits + t * 0
    if PROBE > 0:
        scoring = tl.arange(0, NP)
        same = tl.load(probe_row + scoring, mask=scoring < num_probe_rows, other=-1) == row
        index = tl.max(tl.where(same, scoring, -1), 0)
        which = tl.arange(0, PROBE_P)
        tokens = tl.load(probe_token + index * PROBE + which, mask=(which < PROBE) & (index >= 0), other=-1)
        match = (tokens[None, :] == (begin + t)[:, None]) & row_ok[:, None]
        chosen = tl.max(tl.where(match, which[None, :], -1), 1)  # [M]
        probed = chosen >= 0
        probing = tl.max(chosen, 0) >= 0
        logits_row = logits + (index.to(tl.int64) * logits_row_stride
                               + chosen.to(tl.int64) * logits_query_stride + (kh * G + g) * logits_head_stride)
    if TILED:
        sum_acc = tl.zeros([M, DP], tl.float32)
        sum_total = tl.zeros([M], tl.float32)
        sum_top = tl.full([M], NEG, tl.float32)
        for s in range(tile_first, count_pieces(seen_end, coarse_piece, FINE, NUM_FINE)):
            low = tl.multiple_of(piece_start(s, coarse_piece, FINE, NUM_FINE), 16)
            high = tl.minimum(piece_start(s + 1, coarse_piece, FINE, NUM_FINE), seen_end)
            low += tl.maximum(window_start - low, 0) // BN * BN
            part, part_lse = attend_piece(
                qs, position, low, high, key_cache, value_cache, table, logits_row, probed, probing, scale, softcap,
                key_stride, value_stride, D, DP, M, BN, BS, WINDOW, SOFTCAP, PROBE > 0, DIRECT, PRECISION, STAGES)
            sum_acc, sum_total, sum_top = merge(sum_acc, sum_total, sum_top, part, part_lse)
        store_piece(sum_acc / sum_total[:, None], sum_top + tl.log2(sum_total), out, lse, partial, partial_lse,
                    -1, 0, q_len, begin, t, g, row_ok, value_scale, kh, KH, G, D, DP, PROBE)
    else:
        low = tl.multiple_of(piece_start(piece, coarse_piece, FINE, NUM_FINE), 16)
        high = tl.minimum(piece_start(piece + 1, coarse_piece, FINE, NUM_FINE), seen_end)
        low += tl.maximum(window_start - low, 0) // BN * BN
        if low < high:
            part, part_lse = attend_piece(
                qs, position, low, high, key_cache, value_cache, table, logits_row, probed, probing, scale, softcap,
                key_stride, value_stride, D, DP, M, BN, BS, WINDOW, SOFTCAP, PROBE > 0, DIRECT, PRECISION, STAGES)
            store_piece(part, part_lse, out, lse, partial, partial_lse, base, piece - row_first, q_len, begin, t,
                        g, row_ok, value_scale, kh, KH, G, D, DP, PROBE)


@triton.jit(do_not_specialize=["sinks", "num_probe_rows", "coarse_piece", "list_piece"])
def attend_kernel(
    query,  # [T, H, D]
    key_cache, value_cache,  # [num_blocks, BS, KH, D]
    block_table,  # int32 [S, B]
    units,  # int32 [S, C]; PLACES: where they lie, see RowSelection
    num_units,  # int32 [S]
    items,  # int32 [., FIELDS]: those of this launch's kind
    counters,  # see plan_kernel
    out,  # [T, H, D], contiguous
    lse,  # float32 [T, H], natural log
    partial,  # float32 [capacity, H, D]
    partial_lse,  # float32 [capacity, H], base 2
    probe_row,  # int32 [N]
    probe_token,  # int32 [N, PROBE]
    logits,  # [N, PROBE, H, L]
    scale, softcap, value_scale, sinks, num_probe_rows, coarse_piece, list_piece,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, table_stride,
    units_stride, logits_row_stride, logits_query_stride, logits_head_stride,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, MS: tl.constexpr,
    TM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, UNIT: tl.constexpr, FINE: tl.constexpr,
    NUM_FINE: tl.constexpr, RESTRICT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PROBE: tl.constexpr, PROBE_P: tl.constexpr, NP: tl.constexpr,
    DIRECT: tl.constexpr, TILED: tl.constexpr, SMALL: tl.constexpr, PLACES: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, LIST_STAGES: tl.constexpr,
):
    """Persistent: programs draw items by ticket. An item is one piece (or, TILED, all pieces) of a query tile of one
    key head; M packed query rows, MS of them for restricted rows and, if SMALL, for the others of one query."""
    programs = tl.num_programs(0)
    total_items = tl.load(counters + (1 if TILED else 0)) * KH
    ticket = counters + (3 if TILED else 2)
    item = tl.program_id(0)
    while item < total_items:
        next_item = programs + tl.atomic_add(ticket, 1, sem="relaxed")  # early, so that its latency is hidden
        kh = item % KH
        fields = items + item // KH * FIELDS
        row = tl.load(fields + ROW)
        tile = tl.load(fields + TILE)
        piece = tl.load(fields + PIECE)
        begin = tl.load(fields + BEGIN)
        q_len = tl.load(fields + QUERIES)
        n = tl.load(fields + KEYS)
        slot = tl.load(fields + SLOT).to(tl.int64)
        base = tl.load(fields + BASE)
        tail = tl.load(fields + TAIL)
        keys_here = key_cache + kh * key_head_stride
        values_here = value_cache + kh * value_head_stride
        table = block_table + slot * table_stride
        listed = False
        if RESTRICT:
            listed = tail > 0
        if listed:
            attend_listed(
                query, keys_here, values_here, table, units + slot * units_stride, num_units + slot, out, lse, partial,
                partial_lse, begin, q_len, n, tail, base, piece, list_piece, kh, scale, softcap, value_scale, sinks,
                query_stride, query_head_stride, key_stride, value_stride, KH, G, D, DP, MS, BN, BS, UNIT, WINDOW,
                SOFTCAP, PROBE, TILED, PLACES, PRECISION, LIST_STAGES)
        else:
            small = False
            if SMALL:
                small = tail == -2
            if small:
                attend_tile(
                    query, keys_here, values_here, table, out, lse, partial, partial_lse, probe_row, probe_token,
                    logits, row, tile, begin, q_len, n, base, piece, coarse_piece, kh, scale, softcap, value_scale,
                    num_probe_rows, query_stride, query_head_stride, key_stride, value_stride, logits_row_stride,
                    logits_query_stride, logits_head_stride, KH, G, D, DP, MS, MS // G, BN, BS, FINE, NUM_FINE,
                    WINDOW, SOFTCAP, PROBE, PROBE_P, NP, DIRECT, TILED, PRECISION, STAGES)
            else:
                attend_tile(
                    query, keys_here, values_here, table, out, lse, partial, partial_lse, probe_row, probe_token,
                    logits, row, tile, begin, q_len, n, base, piece, coarse_piece, kh, scale, softcap, value_scale,
                    num_probe_rows, query_stride, query_head_stride, key_stride, value_stride, logits_row_stride,
                    logits_query_stride, logits_head_stride, KH, G, D, DP, M, TM, BN, BS, FINE, NUM_FINE,
                    WINDOW, SOFTCAP, PROBE, PROBE_P, NP, DIRECT, TILED, PRECISION, STAGES)
        item = next_item
