"""merge_attention: attention over two sets of keys from the results over each (torch, any device)."""

import torch
from torch import Tensor


def merge_attention(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """first, second: [Q, H, D], normalised. first_lse, second_lse: float32 [H, Q], natural log. Returns [Q, H, D]."""
    share = torch.sigmoid(second_lse - first_lse).T[..., None]  # [Q, H, 1] of the second
    return (first.float() * (1 - share) + second.float() * share).to(first.dtype)
