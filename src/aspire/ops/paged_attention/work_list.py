"""Triton kernel that plans a step's attention: the work list, and where each token's pieces will be.

Letters as in kernels.py. An item is one piece of one query tile, for all key heads; a row whose pieces cannot be kept
is tiled instead: one item, in a launch of its own, does all pieces of a tile.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

import triton
import triton.language as tl

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
