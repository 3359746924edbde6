"""Triton kernel that combines the pieces of split rows, in order. Letters as in kernels.py."""

# mypy: disable-error-code="no-untyped-def, attr-defined"

import triton
import triton.language as tl

from aspire.ops.paged_attention.kernels import LN2, NEG, merge
from aspire.ops.paged_attention.work_list import DIRECT_RESULT, NO_ROW, NUM_PIECES, PLACE, STRIDE, TOKEN_FIELDS


@triton.jit
def combine_kernel(
    tokens, counters, out, lse, partial, partial_lse, value_scale,  # as in attend_kernel
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
