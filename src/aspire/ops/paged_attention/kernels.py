"""Triton kernels of paged_attention: plan a step's work list, attend its items, combine split rows.

Letters: T tokens, R rows, H query heads, KH key heads, G = H / KH, D head dim (DP: padded to a power of two), S slots,
M packed query rows of a tile (TM tokens x G heads), BN keys of a tile, BS tokens of a cache block.

A row's keys form a virtual axis: position for a full row; sinks, listed units, tail for a restricted one. The axis is
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

NEG = tl.constexpr(-1e30)  # finite, so that differences of two masked values stay finite
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Fields of an item of the work list.
ROW, TILE, PIECE, BEGIN, QUERIES, KEYS, SLOT, BASE, PIECES, TAIL, FIELDS = (tl.constexpr(i) for i in range(11))
# Fields of a token: its first partial, those it has, how far apart they lie.
PLACE, NUM_PIECES, STRIDE, TOKEN_FIELDS = (tl.constexpr(i) for i in range(4))
DIRECT_RESULT = tl.constexpr(-1)  # PLACE of a token whose row is not split
NO_ROW = tl.constexpr(-2)  # PLACE of a token of no row


@triton.jit
def count_pieces(n, coarse_piece, FINE: tl.constexpr, NUM_FINE: tl.constexpr):
    """Pieces that hold the first n keys of the axis."""
    return tl.where(n <= NUM_FINE * FINE, (n + FINE - 1) // FINE,
                    NUM_FINE + (n - NUM_FINE * FINE + coarse_piece - 1) // coarse_piece)


@triton.jit
def piece_start(s, coarse_piece, FINE: tl.constexpr, NUM_FINE: tl.constexpr):
    """First key of piece s."""
    return tl.where(s <= NUM_FINE, s * FINE, NUM_FINE * FINE + (s - NUM_FINE) * coarse_piece)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "partial_capacity", "list_tokens", "sinks", "held_back",
                            "coarse_piece", "list_piece"])
def plan_kernel(
    query_start,  # int32 [R + 1]
    kv_len,  # int32 [R]
    slot_of,  # int32 [R]
    sparse,  # uint8 [R]
    tail_start,  # int32 [S]
    items,  # int32 [max_items, FIELDS]; written here, like the rest below
    tiled_items,  # int32 [max_tiles, FIELDS]
    tokens,  # int32 [T, TOKEN_FIELDS]: where each token's pieces are
    counters,  # int32 [4]: items, tiled items, next ticket of either kind
    num_rows, num_tokens, partial_capacity, list_tokens, sinks,
    held_back,  # items of restricted rows (for all key heads) to leave for the end
    coarse_piece, list_piece,
    RP: tl.constexpr, TM: tl.constexpr, MAX_TILES: tl.constexpr, FINE: tl.constexpr, NUM_FINE: tl.constexpr,
    RESTRICT: tl.constexpr, WINDOW: tl.constexpr, SMALL: tl.constexpr, BLOCK: tl.constexpr,
):
    """One program per row, one for the tokens of no row; each finds its places by a prefix sum over all rows."""
    r = tl.program_id(0)
    rows = tl.arange(0, RP)
    ok = rows < num_rows
    begin = tl.load(query_start + rows, mask=ok, other=0)
    q = tl.load(query_start + rows + 1, mask=ok, other=0) - begin
    n = tl.load(kv_len + rows, mask=ok, other=0)
    slot = tl.load(slot_of + rows, mask=ok, other=0)
    active = ok & (q > 0) & (n > 0)
    length = n
    first = rows * 0
    tail = rows * 0 - 1  # -1: reads everything; -2: so does its only query, which fits a small tile
    restricted = rows < 0
    if WINDOW > 0:
        first = count_pieces(tl.maximum(n - q + 1 - WINDOW, 0) + 1, coarse_piece, FINE, NUM_FINE) - 1
    if RESTRICT:
        tail = tl.load(tail_start + slot, mask=active & (tl.load(sparse + rows, mask=ok, other=0) != 0), other=-1)
        restricted = tail > 0
        tail = tl.where(restricted, tail, -1)
        head = tl.minimum(tl.minimum(tail, sinks), n)
        length = tl.where(restricted, head + tl.minimum(tl.maximum(tail - head, 0), list_tokens) + n - tail, n)
        first = tl.where(restricted, 0, first)
    if SMALL:
        tail = tl.where((restricted == 0) & (q == 1), -2, tail)
    last = tl.where(restricted, (length + list_piece - 1) // list_piece,
                    count_pieces(length, coarse_piece, FINE, NUM_FINE))
    pieces = last - first
    tiles = tl.where(active, (q + TM - 1) // TM, 0)
    needed = tl.where(active & (tiles <= MAX_TILES) & (pieces > 1), q * pieces, 0)
    base = tl.cumsum(needed, 0) - needed
    listed = active & (tiles <= MAX_TILES) & (base + needed <= partial_capacity)
    short = tl.where(listed & restricted, pieces * tiles, 0)
    coarse = tl.where(listed & (restricted == 0), tl.maximum(last - tl.maximum(first, NUM_FINE), 0) * tiles, 0)
    fine = tl.where(listed, pieces * tiles, 0) - coarse - short
    tiled = tl.where(active & (listed == 0), tiles, 0)

    # Long items first, coarse before fine, with items of restricted rows dealt evenly between (they wait for lists,
    # the others for memory), but for some that fill the gaps at the end: a long item drawn last would run alone.
    coarse_at = tl.cumsum(coarse, 0) - coarse
    short_at = tl.cumsum(short, 0) - short
    num_coarse = tl.sum(coarse, 0)
    num_short = tl.sum(short, 0)
    num_long = num_coarse + tl.sum(fine, 0)
    num_between = tl.maximum(num_short - held_back, 0)
    fine_at = num_coarse + tl.cumsum(fine, 0) - fine
    tiled_at = tl.cumsum(tiled, 0) - tiled
    if r == 0:
        tl.store(counters, num_long + num_short)
        tl.store(counters + 1, tl.sum(tiled, 0))
        tl.store(counters + 2 + tl.arange(0, 2), 0)
    me = rows == r
    step = tl.arange(0, BLOCK)
    my_begin = tl.sum(tl.where(me, begin, 0), 0)
    my_q = tl.sum(tl.where(me, q, 0), 0)
    if r == num_rows:
        my_begin = tl.load(query_start + num_rows)
        my_q = num_tokens - my_begin
        for t in range(0, my_q, BLOCK):
            tl.store(tokens + (my_begin + t + step) * TOKEN_FIELDS + PLACE, NO_ROW, mask=t + step < my_q)
    my_tiles = tl.sum(tl.where(me, tiles, 0), 0)
    if my_tiles == 0:
        return
    my_last = tl.sum(tl.where(me, last, 0), 0)
    my_pieces = tl.sum(tl.where(me, pieces, 0), 0)
    my_coarse = tl.sum(tl.where(me, coarse, 0), 0)
    my_short = tl.sum(tl.where(me, short, 0), 0)
    my_fine = tl.sum(tl.where(me, fine, 0), 0)
    my_tiled = tl.sum(tl.where(me, tiled, 0), 0)
    my_coarse_at = tl.sum(tl.where(me, coarse_at, 0), 0)
    my_short_at = tl.sum(tl.where(me, short_at, 0), 0)
    my_fine_at = tl.sum(tl.where(me, fine_at, 0), 0)
    my_tiled_at = tl.sum(tl.where(me, tiled_at, 0), 0)
    my_n = tl.sum(tl.where(me, n, 0), 0)
    my_slot = tl.sum(tl.where(me, slot, 0), 0)
    my_base = tl.sum(tl.where(me, tl.where(listed & (pieces > 1), base, -1), 0), 0)
    my_tail = tl.sum(tl.where(me, tail, 0), 0)
    my_first = tl.sum(tl.where(me, first, 0), 0)
    my_restricted = tl.sum(tl.where(me, restricted.to(tl.int32), 0), 0) > 0
    for t in range(0, my_q, BLOCK):
        seen = my_n - my_q + t + step + 1  # keys up to the token's own
        end = count_pieces(seen, coarse_piece, FINE, NUM_FINE)
        skipped = step * 0  # pieces before the tile's window, which are not written
        if WINDOW > 0:
            window_start = tl.maximum(my_n - my_q + (t + step) // TM * TM + 1 - WINDOW, 0)
            skipped = count_pieces(window_start + 1, coarse_piece, FINE, NUM_FINE) - 1 - my_first
        if my_restricted:
            end = my_last + step * 0
            skipped = step * 0
        to = tokens + (my_begin + t + step) * TOKEN_FIELDS
        place = tl.where(my_base < 0, DIRECT_RESULT, my_base + skipped * my_q + t + step)
        tl.store(to + PLACE, place, mask=t + step < my_q)
        tl.store(to + NUM_PIECES, end - my_first - skipped, mask=t + step < my_q)
        tl.store(to + STRIDE, my_q + step * 0, mask=t + step < my_q)
    for j in range(0, my_coarse + my_short + my_fine + my_tiled, BLOCK):
        i = j + step
        keep = i < my_coarse + my_short + my_fine + my_tiled
        tile = i % my_tiles
        place = tl.where(i < my_coarse, my_coarse_at + i, my_fine_at + i - my_coarse)
        if num_between > 0:  # short i goes before long j where j / num_long >= i / num_between
            if my_short > 0:
                place = my_short_at + i
                before = (place * num_long + num_between - 1) // num_between
                place += tl.where(place < num_between, before, num_long)
            else:
                place += place * num_between // num_long + 1
        elif my_short > 0:
            place = num_long + my_short_at + i
        if my_tiled > 0:
            tile = my_tiles - 1 - i
            place = my_tiled_at + i
        to = (tiled_items if my_tiled > 0 else items) + place * FIELDS
        tl.store(to + ROW, r, mask=keep)
        tl.store(to + TILE, tile, mask=keep)
        tl.store(to + PIECE, my_last - 1 - i // my_tiles, mask=keep)
        tl.store(to + BEGIN, my_begin, mask=keep)
        tl.store(to + QUERIES, my_q, mask=keep)
        tl.store(to + KEYS, my_n, mask=keep)
        tl.store(to + SLOT, my_slot, mask=keep)
        tl.store(to + BASE, my_base, mask=keep)
        tl.store(to + PIECES, my_pieces, mask=keep)
        tl.store(to + TAIL, my_tail, mask=keep)


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
def attend_piece(
    qs,  # [M, DP]
    position,  # int32 [M]
    low, high,  # keys of the virtual axis
    head, listed, tail,
    key_cache, value_cache,  # at this key head
    table,  # int32 [B]: this slot's
    units,  # int32 [C]: this slot's
    logits_row,  # [M] pointers to the probed logits of a packed query row
    probed,  # bool [M]
    probing, scale, softcap, key_stride, value_stride,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, UNIT: tl.constexpr,
    LISTED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PROBE: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """Normalised attention of a query tile to keys [low, high): (float32 [M, DP], log2-sum-exp [M])."""
    d = tl.arange(0, DP)
    acc = tl.zeros([M, DP], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], NEG, tl.float32)
    for j in tl.range(low, high, BN, num_stages=STAGES):
        c = j + tl.arange(0, BN)
        c_ok = c < high
        pos = c
        if LISTED:
            in_list = (c >= head) & (c < head + listed)
            unit = tl.load(units + (c - head) // UNIT, mask=in_list, other=0)
            pos = tl.where(in_list, unit * UNIT + (c - head) % UNIT, tl.where(c < head, c, c - head - listed + tail))
        block = tl.load(table + pos // BS, mask=c_ok, other=0)
        physical = block.to(tl.int64) * BS + pos % BS
        loaded = c_ok[:, None]
        if DP > D:
            loaded = loaded & (d < D)[None, :]
        ks = tl.load(key_cache + physical[:, None] * key_stride + d[None, :], mask=loaded, other=0.0)
        x = tl.dot(qs, tl.trans(ks.to(qs.dtype)), input_precision=PRECISION)
        factor = scale * LOG2E  # of x, to the base-2 exponent; applied last so that it fuses with the subtraction
        if SOFTCAP:
            grown = tl.exp2(x * (scale / softcap * 2 * LOG2E))
            x = softcap * (1.0 - 2.0 / (grown + 1.0))  # softcap * tanh(x * scale / softcap)
            factor = LOG2E
        if PROBE:  # noqa: SIM102 (known at compile time, probing is not)
            if probing:
                if DIRECT:
                    store_pairs(logits_row, c, tl.where(probed, high, 0), x * (factor * LN2))
                else:
                    tl.store(logits_row[:, None] + c[None, :], (x * (factor * LN2)).to(logits_row.dtype.element_ty),
                             mask=probed[:, None] & c_ok[None, :])
        if LISTED:
            visible = c_ok[None, :]
        else:
            visible = c[None, :] <= tl.minimum(position, high - 1)[:, None]
        if WINDOW > 0:
            visible = visible & (pos[None, :] > position[:, None] - WINDOW)
        x = tl.where(visible, x, NEG)
        new = tl.maximum(top, tl.max(x, 1) * factor)
        # Where nothing is visible yet, x * factor - new is the rounding error of a fused product of size 1e29.
        weight = tl.exp2(x * factor - tl.maximum(new, 0.5 * NEG * factor)[:, None])
        keep = tl.exp2(top - new)
        total = total * keep + tl.sum(weight, 1)
        top = new
        vs = tl.load(value_cache + physical[:, None] * value_stride + d[None, :], mask=loaded, other=0.0)
        acc = tl.dot(weight.to(qs.dtype), vs.to(qs.dtype), acc * keep[:, None], input_precision=PRECISION)
    total = tl.maximum(total, 1e-30)  # nothing visible: a piece of zeros that weighs nothing
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def attend_listed(
    query, key_cache, value_cache, table, units, num_units, out, lse, partial, partial_lse,  # as in attend_piece
    begin, q_len, n, tail, base, piece, list_piece, kh, scale, softcap, value_scale, sinks, query_stride,
    query_head_stride, key_stride, value_stride, KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, MS: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PROBE: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """One piece of a restricted row, which has one query."""
    d = tl.arange(0, DP)
    m = tl.arange(0, MS)
    t = m // G
    g = m % G
    row_ok = m < G  # a restricted row has one query
    offset = (begin + t).to(tl.int64) * query_stride + (kh * G + g) * query_head_stride
    qs = tl.load(query + offset[:, None] + d[None, :], mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    head = tl.minimum(tl.minimum(tail, sinks), n)
    listed = tl.minimum(tl.load(num_units) * UNIT, tl.maximum(tail - head, 0))
    low = tl.multiple_of(piece * list_piece, 16)
    high = tl.minimum(low + list_piece, head + listed + n - tail)
    if TILED:  # the row's partials did not fit
        low = 0
        high = head + listed + n - tail
    # A list shorter than it may be leaves pieces without keys: zeros that weigh nothing.
    part = tl.zeros([MS, DP], tl.float32)
    part_lse = tl.full([MS], NEG, tl.float32)
    if low < high:
        part, part_lse = attend_piece(
            qs, n - 1 + t * 0, low, high, head, listed, tail, key_cache, value_cache, table,
            units, out + t * 0, row_ok, False, scale, softcap, key_stride, value_stride,
            D, DP, MS, BN, BS, UNIT, True, WINDOW, SOFTCAP, False, False, PRECISION, STAGES)
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
                qs, position, low, high, 0, 0, 0, key_cache, value_cache, table, table, logits_row, probed,
                probing, scale, softcap, key_stride, value_stride, D, DP, M, BN, BS, 1, False, WINDOW,
                SOFTCAP, PROBE > 0, DIRECT, PRECISION, STAGES)
            sum_acc, sum_total, sum_top = merge(sum_acc, sum_total, sum_top, part, part_lse)
        store_piece(sum_acc / sum_total[:, None], sum_top + tl.log2(sum_total), out, lse, partial, partial_lse,
                    -1, 0, q_len, begin, t, g, row_ok, value_scale, kh, KH, G, D, DP, PROBE)
    else:
        low = tl.multiple_of(piece_start(piece, coarse_piece, FINE, NUM_FINE), 16)
        high = tl.minimum(piece_start(piece + 1, coarse_piece, FINE, NUM_FINE), seen_end)
        low += tl.maximum(window_start - low, 0) // BN * BN
        if low < high:
            part, part_lse = attend_piece(
                qs, position, low, high, 0, 0, 0, key_cache, value_cache, table, table, logits_row, probed,
                probing, scale, softcap, key_stride, value_stride, D, DP, M, BN, BS, 1, False, WINDOW,
                SOFTCAP, PROBE > 0, DIRECT, PRECISION, STAGES)
            store_piece(part, part_lse, out, lse, partial, partial_lse, base, piece - row_first, q_len, begin, t,
                        g, row_ok, value_scale, kh, KH, G, D, DP, PROBE)


@triton.jit(do_not_specialize=["sinks", "num_probe_rows", "coarse_piece", "list_piece"])
def attend_kernel(
    query,  # [T, H, D]
    key_cache, value_cache,  # [num_blocks, BS, KH, D]
    block_table,  # int32 [S, B]
    units,  # int32 [S, C]
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
    DIRECT: tl.constexpr, TILED: tl.constexpr, SMALL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    LIST_STAGES: tl.constexpr,
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
                SOFTCAP, PROBE, TILED, PRECISION, LIST_STAGES)
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


@triton.jit
def combine_kernel(
    tokens, counters, out, lse, partial, partial_lse, value_scale,  # as above
    KH: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PROBE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One program per token and key head: merges the pieces of split rows in order; zeros tokens of no row."""
    token = tl.program_id(0)
    kh = tl.program_id(1)
    place = tl.load(tokens + token * TOKEN_FIELDS + PLACE)
    pieces = tl.load(tokens + token * TOKEN_FIELDS + NUM_PIECES)
    stride = tl.load(tokens + token * TOKEN_FIELDS + STRIDE).to(tl.int64) * (KH * G)
    if (token == 0) & (kh == 0):
        tl.store(counters + 2, 0)
        tl.store(counters + 3, 0)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    ok = (g < G)[:, None] & (d < D)[None, :]
    to = token.to(tl.int64) * (KH * G) + kh * G + g
    if place == NO_ROW:
        tl.store(out + to[:, None] * D + d[None, :], tl.zeros([GP, DP], out.dtype.element_ty), mask=ok)
        return
    if place == DIRECT_RESULT:
        return
    acc = tl.zeros([GP, DP], tl.float32)
    total = tl.zeros([GP], tl.float32)
    top = tl.full([GP], NEG, tl.float32)
    at = place.to(tl.int64) * (KH * G) + kh * G + g
    for s0 in range(0, pieces, UNROLL):
        for u in tl.static_range(UNROLL):
            there = s0 + u < pieces
            here = at + (s0 + u) * stride
            part_lse = tl.load(partial_lse + here, mask=(g < G) & there, other=-2e30)
            part = tl.load(partial + here[:, None] * D + d[None, :], mask=ok & there, other=0.0)
            acc, total, top = merge(acc, total, top, part, part_lse)
    tl.store(out + to[:, None] * D + d[None, :], (acc / total[:, None] * value_scale).to(out.dtype.element_ty), mask=ok)
    if PROBE > 0:
        tl.store(lse + to, (top + tl.log2(total)) * LN2, mask=g < G)
