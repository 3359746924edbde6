"""rotate: rotary position embedding of queries and keys (torch, any device)."""

import torch
from torch import Tensor


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query [T, H, D] and key [T, K, D] with their first 2 * cos.shape[-1] dimensions rotated; cos, sin [T, dim / 2].

    Dimension i is paired with i + dim / 2 (Hugging Face's order; Su et al., arXiv 2104.09864, pairs neighbours).
    Every product is rounded to the dtype before the sum, as torch does.
    """
    cos, sin = cos[:, None], sin[:, None]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half:2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half:]), dim=-1)
