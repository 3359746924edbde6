"""Triton kernel of locate. Programs of one launch do not wait for each other, so none reads what another writes: a
changed block-table entry is looked up among the changes, an anchored tail is computed anew from what it is made of.
Programs that change tables come last, so that the interpreter, which runs them in turn, shows who relies on that.

Letters: those of values.py; BLOCK tokens, rows, picks, scoring rows or changes a program.
"""
# mypy: disable-error-code="no-untyped-def, attr-defined"

import triton
import triton.language as tl

COUNTS = ("num_tokens", "num_rows", "num_picks", "num_verify", "num_draft", "num_updates", "num_entries",
          "num_contexts", "scratch")


@triton.jit
def row_place(slot_of, start_of, drafted_of, decode_of, sparse_of, num_known, row, real):
    """(slot int64, first position int64, drafts before its first token, decode, sparse) of rows."""
    slot = tl.load(slot_of + row, mask=real, other=0).to(tl.int64)
    decode = tl.load(decode_of + row, mask=real, other=0) != 0
    sparse = tl.load(sparse_of + row, mask=real, other=0) != 0
    before = tl.load(drafted_of + row, mask=real & sparse, other=0)
    known = tl.load(num_known + slot, mask=real & decode, other=1)
    given = tl.load(start_of + row, mask=real & (decode == 0), other=0)
    return slot, tl.where(decode, known - 1 + before, given), before, decode, sparse


@triton.jit
def context_of(row_tokens, drafted_of, start, decode, sparse, row, real, num_contexts):
    """(keys of a row, of them those that do not depend on drafts, at most what the tables know)."""
    count = tl.load(row_tokens + row, mask=real, other=0)
    kv = tl.where(count > 0, start + count, 0)
    drafts = tl.load(drafted_of + row, mask=real & decode & (sparse == 0), other=0)
    # a surplus step of the overlapped loop may pass the end
    return kv, tl.minimum(kv - drafts, num_contexts - 1)


@triton.jit
def changed_block(update_index, update_block, at, num_updates, BLOCK: tl.constexpr, UPDATES: tl.constexpr):
    """The new block of table entries `at`, -1 where this step does not change it."""
    found = tl.full((BLOCK,), -1, tl.int32)
    for begin in range(0, num_updates, UPDATES):
        u = begin + tl.arange(0, UPDATES)
        index = tl.load(update_index + u, mask=u < num_updates, other=-1)
        block = tl.load(update_block + u, mask=u < num_updates, other=-1)
        found = tl.maximum(found, tl.max(tl.where(at[:, None] == index[None, :], block[None, :], -1), 1))
    return found


@triton.jit(do_not_specialize=COUNTS)
def locate_kernel(
    token_row, token_offset, token_given,  # int32 [T]; in the order of StepInputs down to update_block
    query_start,  # int32 [R + 1]
    slot_of, start_of, row_tokens, drafted_of, decode_of, sparse_of, rests_of, emits_of,  # int32 [R]
    pick_token, pick_row,  # int32 [N]
    pick_index,  # unused here
    verify_token,  # int32 [V, Q]
    verify_row, draft_row,  # int32 [V], [D]
    update_index, update_block,  # int32 [U]
    num_known, tokens, block_table,  # int64 [S], int64 [S, WIDTH], int32 [S, B]; SlotTables down to quota_of
    tail_start, quota,  # int32 [S]
    temperature, top_k, top_p, min_p, seed,  # [S]
    tail_of, quota_of,  # int32 [L]
    token_out, position_out, mapping_out,  # int64 [T]
    kv_len_out, sparse_out, rests_out,  # int32, uint8, uint8 [R]
    pick_position_out, temperature_out, top_k_out, top_p_out, min_p_out, seed_out,  # [N]
    scoring_token_out,  # int32 [V + D, Q]
    scoring_row_out, scoring_slot_out, first_out, last_out, wanted_out,  # int32, int64, int32 ... [V + D]
    draft_token_out,  # int32 [D]
    num_tokens, num_rows, num_picks, num_verify, num_draft, num_updates, num_entries, num_contexts, scratch,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, FIRST_UNIT: tl.constexpr, Q: tl.constexpr,
    QP: tl.constexpr, BLOCK: tl.constexpr, UPDATES: tl.constexpr,
):
    token_programs = tl.cdiv(num_tokens, BLOCK)
    pick_programs = tl.cdiv(num_picks, BLOCK)
    scoring_programs = tl.cdiv(num_verify + num_draft, BLOCK)
    row_programs = tl.cdiv(num_rows, BLOCK)
    part = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if part < token_programs:
        t = part * BLOCK + i
        row = tl.load(token_row + t, mask=t < num_tokens, other=-1)
        real = row >= 0
        slot, start, before, decode, _ = row_place(slot_of, start_of, drafted_of, decode_of, sparse_of, num_known, row,
                                                   real)
        offset = tl.load(token_offset + t, mask=real, other=0)
        position = tl.where(real, start + offset, 0)
        column = tl.minimum(offset + before, WIDTH - 1)
        drawn = tl.load(tokens + slot * WIDTH + column, mask=real & decode, other=0)
        given = tl.load(token_given + t, mask=real & (decode == 0), other=0)
        at = slot * num_entries + tl.minimum(position // BLOCK_SIZE, num_entries - 1)
        old = tl.load(block_table + at, mask=real, other=0)
        new = changed_block(update_index, update_block, at, num_updates, BLOCK, UPDATES)
        block = tl.where(new >= 0, new, old).to(tl.int64)
        tl.store(token_out + t, tl.where(decode, drawn, given), mask=t < num_tokens)
        tl.store(position_out + t, position, mask=t < num_tokens)
        tl.store(mapping_out + t, tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=t < num_tokens)
        return
    part -= token_programs
    if part < pick_programs:
        n = part * BLOCK + i
        ok = n < num_picks
        row = tl.load(pick_row + n, mask=ok, other=-1)
        real = row >= 0
        slot, start, _, _, _ = row_place(slot_of, start_of, drafted_of, decode_of, sparse_of, num_known, row, real)
        slot = tl.where(real, slot, scratch)
        t = tl.load(pick_token + n, mask=real, other=0)
        offset = tl.load(token_offset + t, mask=real, other=0)
        tl.store(pick_position_out + n, tl.where(real, start + offset + 1, 0), mask=ok)
        tl.store(temperature_out + n, tl.load(temperature + slot, mask=ok), mask=ok)
        tl.store(top_k_out + n, tl.load(top_k + slot, mask=ok), mask=ok)
        tl.store(top_p_out + n, tl.load(top_p + slot, mask=ok), mask=ok)
        tl.store(min_p_out + n, tl.load(min_p + slot, mask=ok), mask=ok)
        tl.store(seed_out + n, tl.load(seed + slot, mask=ok), mask=ok)
        return
    part -= pick_programs
    if part < scoring_programs:
        n = part * BLOCK + i
        verifies = n < num_verify
        ok = n < num_verify + num_draft
        row = tl.where(verifies, tl.load(verify_row + n, mask=verifies, other=-1),
                       tl.load(draft_row + n - num_verify, mask=ok & (verifies == 0), other=-1))
        real = row >= 0
        slot, start, _, decode, sparse = row_place(slot_of, start_of, drafted_of, decode_of, sparse_of, num_known, row,
                                                   real)
        slot = tl.where(real, slot, scratch)
        _, context = context_of(row_tokens, drafted_of, start, decode, sparse, row, real, num_contexts)
        anchors = real & (tl.load(emits_of + row, mask=real, other=0) != 0)
        stays = ok & (anchors == 0)
        tail = tl.where(anchors, tl.load(tail_of + context, mask=anchors, other=0),
                        tl.load(tail_start + slot, mask=stays, other=0))
        wanted = tl.where(anchors, tl.load(quota_of + context, mask=anchors, other=0),
                          tl.load(quota + slot, mask=stays, other=0))
        tl.store(scoring_row_out + n, row, mask=ok)
        tl.store(scoring_slot_out + n, slot, mask=ok)
        tl.store(first_out + n, tl.full((BLOCK,), FIRST_UNIT, tl.int32), mask=ok)
        tl.store(last_out + n, tail // UNIT, mask=ok)
        tl.store(wanted_out + n, wanted, mask=ok)
        drafts = real & (verifies == 0)
        own = tl.where(drafts, tl.load(query_start + row, mask=drafts, other=0), -1)
        tl.store(draft_token_out + n - num_verify, own, mask=ok & (verifies == 0))
        q = tl.arange(0, QP)[None, :]
        place = n[:, None] * Q + q
        theirs = tl.load(verify_token + place, mask=verifies[:, None] & (q < Q), other=-1)
        token = tl.where(verifies[:, None], theirs, tl.where(q == 0, own[:, None], -1))
        tl.store(scoring_token_out + place, token, mask=ok[:, None] & (q < Q))
        return
    part -= scoring_programs
    if part < row_programs:
        row = part * BLOCK + i
        real = row < num_rows
        slot, start, _, decode, sparse = row_place(slot_of, start_of, drafted_of, decode_of, sparse_of, num_known, row,
                                                   real)
        kv, context = context_of(row_tokens, drafted_of, start, decode, sparse, row, real, num_contexts)
        tl.store(kv_len_out + row, kv.to(tl.int32), mask=real)
        tl.store(sparse_out + row, sparse.to(tl.uint8), mask=real)
        tl.store(rests_out + row, (tl.load(rests_of + row, mask=real, other=0) != 0).to(tl.uint8), mask=real)
        anchors = real & (tl.load(emits_of + row, mask=real, other=0) != 0)
        tl.store(tail_start + slot, tl.load(tail_of + context, mask=anchors, other=0), mask=anchors)
        tl.store(quota + slot, tl.load(quota_of + context, mask=anchors, other=0), mask=anchors)
        return
    u = (part - row_programs) * BLOCK + i
    index = tl.load(update_index + u, mask=u < num_updates, other=0)
    tl.store(block_table + index, tl.load(update_block + u, mask=u < num_updates, other=0), mask=u < num_updates)
