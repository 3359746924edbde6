"""key_scores: attention mass per unit of keys, from the logits an attention pass wrote (torch, any device).

Letters: N scoring rows, Q queries each, T tokens, H query heads, L key positions, U units, B blocks.
"""

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aspire.attention.rows import AttentionRows, Probe


def query_positions(token: Tensor, row: Tensor, rows: "AttentionRows") -> Tensor:
    """Absolute position of each probed query token; -1 where unused. token: [N, Q], row: [N]. Returns int64 [N, Q]."""
    index = row.long()
    end = rows.query_start[index + 1].long()  # [N]
    position = rows.kv_len[index].long()[:, None] - end[:, None] + token.long()
    return torch.where(token >= 0, position, -1)


def key_scores(probe: "Probe", lse: Tensor, rows: "AttentionRows", *, unit: int,
               reduce: Literal["mean", "max"], window: int | None = None, out: Tensor | None = None) -> Tensor:
    """Softmax mass per unit: reduced over heads per key, summed inside the unit, averaged over the used queries.

    lse: float32 [B * T, H], natural log, of the B passes over the same rows that filled probe.logits [B * N, Q, H, L]
    (several layers, say). window: as in AttentionOptions. Returns float32 [B * N, U], U = ceil(L / unit); units past
    the last query's position are unspecified (0 here), a row whose tokens are all -1 scores 0. out: where to write
    them, contiguous; else a new tensor.
    """
    blocks = max(1, len(probe.logits) // max(1, len(probe.row)))
    parts = [_scores_of_block(logits, norm, probe, rows, unit, reduce, window)
             for logits, norm in zip(probe.logits.chunk(blocks), lse.chunk(blocks), strict=True)]
    return torch.cat(parts) if out is None else torch.cat(parts, out=out)


def _scores_of_block(logits: Tensor, lse: Tensor, probe: "Probe", rows: "AttentionRows", unit: int,
                     reduce: Literal["mean", "max"], window: int | None) -> Tensor:
    """logits: [N, Q, H, L], lse: [T, H] -> [N, U]."""
    num_units = -(-logits.shape[-1] // unit)
    length = min(logits.shape[-1], rows.max_kv_len)
    used = probe.token >= 0  # [N, Q]
    position = query_positions(probe.token, probe.row, rows)  # [N, Q]
    norm = lse[probe.token.clamp(min=0).long()]  # [N, Q, H]
    keys = torch.arange(length, device=lse.device)
    visible = keys <= position[..., None]  # [N, Q, L]
    if window is not None:
        visible &= keys > position[..., None] - window
    mass = torch.exp(logits[..., :length].float() - norm[..., None])  # [N, Q, H, L]
    mass = torch.where(visible[:, :, None], mass, 0.0)
    per_key = mass.mean(2) if reduce == "mean" else mass.amax(2)  # [N, Q, L]
    per_key = per_key.sum(1) / used.sum(1).clamp(min=1)[:, None]  # [N, L]
    per_key = torch.nn.functional.pad(per_key, (0, num_units * unit - length))
    return per_key.view(-1, num_units, unit).sum(-1)
