"""key_scores on CUDA: one program per scoring row and run of keys; heads are reduced in a fixed order."""

# mypy: disable-error-code="no-untyped-def, attr-defined"

from typing import TYPE_CHECKING, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from aspire.attention.rows import AttentionRows, Probe

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["length", "num_units", "num_rows", "num_tokens"])
def scores_kernel(
    logits,  # [B * N, Q, H, L]
    lse,  # float32 [B * T, H]
    token_of,  # int32 [N, Q]
    row_of,  # int32 [N]
    query_start,  # int32 [R + 1]
    kv_len,  # int32 [R]
    scores,  # float32 [B * N, U]
    length, num_units, num_rows, num_tokens, row_stride, query_stride, head_stride,
    Q: tl.constexpr, H: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    IS_MAX: tl.constexpr, WINDOW: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    m = n % num_rows
    row = tl.load(row_of + m)
    lse += n // num_rows * num_tokens * H
    last = -1
    used = 0
    for i in tl.static_range(Q):
        token = tl.load(token_of + m * Q + i)
        if token >= 0:
            last = tl.maximum(last, tl.load(kv_len + row) - tl.load(query_start + row + 1) + token)
            used += 1
    if first > tl.maximum(last, 0):
        return
    keys = first + tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(Q):
        token = tl.load(token_of + m * Q + i)
        if token >= 0:
            position = tl.load(kv_len + row) - tl.load(query_start + row + 1) + token
            seen = (keys <= position) & (keys < length)
            if WINDOW > 0:
                seen = seen & (keys > position - WINDOW)
            total = tl.zeros([BLOCK], tl.float32)
            for h in tl.range(0, H, loop_unroll_factor=UNROLL):  # many loads in flight
                norm = tl.load(lse + token.to(tl.int64) * H + h) * LOG2E
                x = tl.load(logits + n * row_stride + i * query_stride + h * head_stride + keys, mask=seen, other=0.0)
                share = tl.where(seen, tl.exp2(x.to(tl.float32) * LOG2E - norm), 0.0)
                if IS_MAX:
                    total = tl.maximum(total, share)
                else:
                    total += share
            if IS_MAX:
                mass += total
            else:
                mass += total / H
    mass = tl.sum(tl.reshape(mass, [BLOCK // UNIT, UNIT]), 1) / tl.maximum(used, 1)
    unit = first // UNIT + tl.arange(0, BLOCK // UNIT)
    tl.store(scores + n * num_units + unit, mass, mask=unit < num_units)


def key_scores(probe: "Probe", lse: Tensor, rows: "AttentionRows", *, unit: int,
               reduce: Literal["mean", "max"], window: int | None = None, out: Tensor | None = None) -> Tensor:
    """See reference.py; unit is a power of two here, and units past the last query's position stay unwritten."""
    assert unit == triton.next_power_of_2(unit) <= 256, "a unit is a power of two up to 256"
    assert probe.logits.stride(3) == 1, "keys are contiguous"
    num_rows, queries, heads, width = probe.logits.shape
    blocks = max(1, num_rows // max(1, len(probe.row)))
    length = min(width, rows.max_kv_len)
    num_units = -(-width // unit)
    scores = torch.empty(num_rows, num_units, dtype=torch.float32, device=lse.device) if out is None else out
    assert scores.stride() == (num_units, 1), "scores are contiguous"
    block = max(256, unit)  # few rows may score: many programs, with many loads in flight
    scores_kernel[(num_rows, triton.cdiv(length, block))](
        probe.logits, lse, probe.token, probe.row, rows.query_start, rows.kv_len, scores, length, num_units,
        len(probe.row), len(lse) // blocks, probe.logits.stride(0), probe.logits.stride(1),
        probe.logits.stride(2), Q=queries, H=heads, UNROLL=min(16, heads), BLOCK=block, UNIT=unit,
        IS_MAX=reduce == "max", WINDOW=window or 0, num_warps=2)
    return scores
