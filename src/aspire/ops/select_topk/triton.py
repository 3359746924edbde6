"""select_topk on CUDA: grids depend on shapes alone, so a captured graph can hold it. See kernels.py for the method."""

from typing import Any

import torch
import triton
from torch import Tensor

from aspire.ops.select_topk.kernels import choose_kernel, keep_kernel, peaks_kernel, select_kernel
from aspire.ops.select_topk.lists import ListRows

KEEP = 16384  # units that one program holds in registers
MOST_GROUPS = 16384  # of rows whose capacity is larger, everything is kept
COLUMNS = 64  # groups of a program
DEPTH = 32  # units of each group that it reads at once


def select_topk(scores: Tensor, first: Tensor, last: Tensor, k: Tensor, *, capacity: int,
                coverage: float | None) -> tuple[Tensor, Tensor]:
    """See reference.py. With coverage, sums are float32, so the last unit may differ from the reference's."""
    units = torch.empty(len(scores), capacity, dtype=torch.int32, device=scores.device)
    num = torch.empty(len(scores), dtype=torch.int32, device=scores.device)
    target = (units, num, num, num, num, 0, 0, 0, 0, 0, 0, 0, len(scores))
    _select(scores, (first, last, k), target, coverage, {"LISTS": False, "PER_BLOCK": 0})
    return units, num


def select_into(scores: Tensor, first: Tensor, last: Tensor, k: Tensor, *, coverage: float | None,
                lists: ListRows) -> None:
    """See reference.py."""
    assert lists.units.is_contiguous(), "lists lie one after the other"
    assert lists.num_units.is_contiguous(), "lists lie one after the other"
    if not len(scores):
        return
    assert len(scores) % len(lists.slot) == 0, "whole blocks of rows"
    spare = lists.num_units
    places = (spare, spare, 0) if lists.places is None else (
        lists.places.stored, lists.places.block_table, lists.places.block_table.stride(0))
    target = (lists.units, lists.num_units, lists.slot, *places, lists.units.shape[1], lists.num_verify, *lists.verify,
              *lists.draft, len(lists.slot))
    kind = {"LISTS": True, "PER_BLOCK": 0 if lists.places is None else lists.places.per_block}
    _select(scores, (first, last, k), target, coverage, kind)


def _select(scores: Tensor, ranges: tuple[Tensor, Tensor, Tensor], target: tuple[Any, ...], coverage: float | None,
            kind: dict[str, Any]) -> None:
    """target: what the kernels take from `units` to `num_rows`. kind: constants that belong to it."""
    num_rows, num_units = scores.shape
    capacity = target[0].shape[-1]
    assert scores.stride(1) == 1, "units are contiguous"
    if num_rows == 0:
        return
    sizes = {"CAPACITY": capacity, "CP": triton.next_power_of_2(capacity), "COVERAGE": coverage is not None, **kind}
    if num_units > KEEP:
        _select_long(scores, ranges, target, coverage or 0.0, sizes)
        return
    block = triton.next_power_of_2(num_units)
    select_kernel[(num_rows,)](
        scores, *ranges, *target, coverage or 0.0, num_units, scores.stride(0), BLOCK=block, **sizes,
        num_warps=min(16, max(4, block // 1024)))


def _select_long(scores: Tensor, ranges: tuple[Tensor, Tensor, Tensor], target: tuple[Any, ...], coverage: float,
                 sizes: dict[str, Any]) -> None:
    """Rows that do not fit in a program's registers."""
    num_rows, num_units = scores.shape
    capacity, device = sizes["CAPACITY"], scores.device
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
        scores, *ranges, peaks, mass, num_units, target[-1], scores.stride(0), CAPACITY=capacity, GROUPS=groups,
        COLUMNS=COLUMNS, DEPTH=DEPTH, COVERAGE=sizes["COVERAGE"], num_warps=4)
    keep_kernel[(num_rows, chunks)](
        scores, *ranges, peaks, kept_keys, kept_units, counts, num_units, target[-1], scores.stride(0),
        CAPACITY=capacity, GROUPS=groups, CHUNK=chunk, num_warps=max(4, min(16, max(groups, chunk) // 512)))
    choose_kernel[(num_rows,)](
        *ranges, mass, kept_keys, kept_units, counts, *target, coverage, num_units, GROUPS=groups, BLOCK=block,
        CHUNKS=chunks, CHUNK=chunk, **sizes, num_warps=max(4, min(16, block // 256)))
