"""select_topk: the best-scoring units of each row, in ascending order (torch, any device)."""

import torch
from torch import Tensor

from aspire.ops.select_topk.lists import ListRows


def select_topk(scores: Tensor, first: Tensor, last: Tensor, k: Tensor, *, capacity: int,
                coverage: float | None) -> tuple[Tensor, Tensor]:
    """Pick up to k[n] units of [first[n], last[n]) with the highest scores; equal scores: the lower index wins.

    scores: float32 [N, U], not negative inside the candidates, anything outside. first, last, k: int [N]; candidates
    are clipped to [0, U), k to capacity. coverage: stop earlier, at the smallest set of best units that holds this
    share of the candidates' mass. Returns (units int32 [N, capacity], ascending, padded with -1; number int32 [N]).
    """
    num_rows, num_units = scores.shape
    index = torch.arange(num_units, device=scores.device)
    candidate = (index >= first[:, None]) & (index < last[:, None])  # [N, U]
    key = torch.where(candidate, scores, -torch.inf)
    ordered, order = key.sort(dim=1, descending=True, stable=True)  # [N, U]
    count = torch.minimum(k.long().clamp(0, capacity), candidate.sum(1))  # [N]
    if coverage is not None:
        mass = ordered.clamp(min=0.0).double().cumsum(1)
        target = coverage * mass[:, -1:]
        count = torch.minimum(count, (mass < target).sum(1) + 1)
    width = min(capacity, num_units)
    chosen = torch.where(torch.arange(width, device=scores.device) < count[:, None], order[:, :width], num_units)
    ascending = chosen.sort(dim=1).values
    units = torch.full((num_rows, capacity), -1, dtype=torch.int32, device=scores.device)
    units[:, :width] = torch.where(ascending < num_units, ascending, -1).to(torch.int32)
    return units, count.to(torch.int32)


def select_into(scores: Tensor, first: Tensor, last: Tensor, k: Tensor, *, coverage: float | None,
                lists: ListRows) -> None:
    """select_topk, with results in the lists that the rows set, instead of new tensors.

    scores: float32 [B * N, U], B blocks of the N rows of `lists`; first, last, k: int [N]. See ListRows.
    """
    num_rows = len(lists.slot)
    kinds = ((lists.verify, slice(0, lists.num_verify)), (lists.draft, slice(lists.num_verify, None)))
    for block in range(len(scores) // max(1, num_rows)):
        units, num_units = select_topk(scores[block * num_rows : (block + 1) * num_rows], first, last, k,
                                       capacity=lists.units.shape[2], coverage=coverage)
        for (start, count), part in kinds:
            slot = lists.slot[part]
            for index in range(start + block, start + block + count):
                lists.units[index, slot] = units[part]
                lists.num_units[index, slot] = num_units[part]
                if lists.places is not None:
                    per_block = lists.places.per_block
                    unit = units[part].clamp(min=0).long()
                    table = lists.places.block_table[slot].gather(1, unit // per_block)
                    lists.places.stored[index, slot] = (table * per_block + unit % per_block).int()
