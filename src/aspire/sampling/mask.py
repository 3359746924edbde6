"""Masks of allowed tokens as bits: 32 token ids to an int32 word, the lowest id in the lowest bit."""

import torch
from torch import Tensor


def num_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """logits [N, V] with -inf where the bit is 0. bitmask: int32 [N, ceil(V / 32)]."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bitmask.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(~allowed, -torch.inf)
