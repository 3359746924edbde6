"""rotate: reference against complex multiplication, kernel against the reference."""

import pytest
import torch

from aspire.ops.rotate.reference import rotate

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((5, 9, 3, 64, 32), (3, 4, 1, 12, 6), (2, 17, 8, 20, 4), (1, 1, 1, 96, 24))  # tokens, H, K, D, half


@pytest.mark.parametrize("half", [4, 3])
def test_reference_is_a_complex_product(half: int) -> None:
    """Planted fault: the sign of the second half's product."""
    angles = torch.randn(5, half)
    query, key = torch.randn(5, 3, 8), torch.randn(5, 2, 8)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    for out, x in zip(rotate(query, key, angles.cos(), angles.sin()), (query, key), strict=True):
        turned = torch.complex(x[..., :half], x[..., half:2 * half]) * turn
        torch.testing.assert_close(out, torch.cat((turned.real, turned.imag, x[..., 2 * half:]), -1))


@pytest.mark.interpret
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim", "half"), SHAPES)
def test_kernel_interpreted(tokens: int, heads: int, kv_heads: int, dim: int, half: int) -> None:
    """Planted faults: key programs start at the query's heads; the rest of a partial rotary not copied."""
    from aspire.testing.model_op_checks import check_rotate

    check_rotate(tokens, heads, kv_heads, dim, half, dtype=torch.float32, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim", "half"), [*SHAPES, (70, 32, 8, 128, 64)])
def test_kernel_on_gpu(tokens: int, heads: int, kv_heads: int, dim: int, half: int, dtype: torch.dtype) -> None:
    """The compiled kernel gives the reference's bits. Fault found: products fused with their sum, unrounded."""
    from aspire.testing.model_op_checks import check_rotate

    check_rotate(tokens, heads, kv_heads, dim, half, dtype=dtype, device="cuda")
