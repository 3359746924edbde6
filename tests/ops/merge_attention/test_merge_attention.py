"""merge_attention: reference against attention over all keys, kernel against the reference."""

import pytest
import torch
from torch import Tensor

from aspire.ops.merge_attention.reference import merge_attention


def piece(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """query [Q, H, D], key and value [N, H, D]: result [Q, H, D] and lse [H, Q]."""
    logits = torch.einsum("qhd,nhd->hqn", query, key)
    return torch.einsum("hqn,nhd->qhd", logits.softmax(-1), value), logits.logsumexp(-1)


def test_reference_is_attention_over_both_sets() -> None:
    """Planted fault: the shares exchanged."""
    query, key, value = torch.randn(5, 3, 8), torch.randn(20, 3, 8), torch.randn(20, 3, 8)
    merged = merge_attention(*piece(query, key[:13], value[:13]), *piece(query, key[13:], value[13:]))
    torch.testing.assert_close(merged, piece(query, key, value)[0])


def check(num_queries: int, num_heads: int, dim: int, dtype: torch.dtype, device: str) -> None:
    """Strided inputs, lse far apart in both directions."""
    from aspire.ops.merge_attention.triton import merge_attention as kernel
    from aspire.testing.model_op_checks import poisoned_memory

    first = torch.randn(num_heads, num_queries, dim, device=device).to(dtype).transpose(0, 1)
    second = torch.randn(num_queries, num_heads, 2 * dim, device=device).to(dtype)[..., :dim]
    lse = torch.randn(2, num_heads, num_queries + 3, device=device)[..., :num_queries] * 20
    with poisoned_memory():
        out = kernel(first, lse[0], second, lse[1])
    torch.testing.assert_close(out, merge_attention(first, lse[0], second, lse[1]))


@pytest.mark.interpret
@pytest.mark.parametrize(("num_queries", "num_heads", "dim"), [(5, 3, 24), (2, 40, 64), (1, 1, 128)])
def test_kernel_interpreted(num_queries: int, num_heads: int, dim: int) -> None:
    """Planted faults: the first's head stride used for the second; a share relative to the first, which overflows."""
    check(num_queries, num_heads, dim, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_queries", "num_heads", "dim"), [(2048, 32, 128), (33, 9, 64), (7, 8, 96)])
def test_kernel_on_gpu(num_queries: int, num_heads: int, dim: int, dtype: torch.dtype) -> None:
    check(num_queries, num_heads, dim, dtype, "cuda")
