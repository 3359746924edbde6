"""PickRows: where in its request each row of logits stands. Letters: N rows, S slots (scratch included), K drafts."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PickRows:
    """All on the device. Row i chooses the token at `position[i]` of the request in `slot[i]`; `num_before[i]` drafts
    of this round, drafts[slot[i], : num_before[i]], lie between its last known token and that position."""

    slot: Tensor  # int64 [N]
    position: Tensor  # int64 [N]
    num_before: Tensor  # int64 [N], at most K
    drafts: Tensor  # int64 [S, K]; stale past num_before


def last_tokens(history: Tensor, fresh: Tensor, num_fresh: Tensor) -> Tensor:
    """The last H tokens of history + fresh[: num_fresh], per row. history: [N, H], fresh: [N, K] -> [N, H]."""
    both = torch.cat([history, fresh], dim=1)
    index = num_fresh.unsqueeze(1) + torch.arange(history.shape[1], device=history.device)
    return both.gather(1, index)


def ban(logits: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """logits [N, V] with -inf at tokens [N, M] where `where` [N, M] holds; other entries of `tokens` may be anything
    in the vocabulary."""
    amount = torch.zeros(tokens.shape, dtype=logits.dtype, device=logits.device).masked_fill_(where, -torch.inf)
    return logits.scatter_add(1, tokens, amount)
