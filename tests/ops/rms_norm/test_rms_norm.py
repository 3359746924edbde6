"""rms_norm and add_rms_norm: reference against the formula in float64, kernels against the reference."""

import pytest
import torch

from aspire.ops.rms_norm.reference import add_rms_norm, rms_norm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((5, 7, None), (3, 576, None), (4, 64, 3), (9, 96, 5), (2, 1030, None))  # rows, dim, heads


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_reference_is_the_formula(offset: float) -> None:
    """Planted fault: the mean replaced by the sum."""
    x, residual, weight = torch.randn(4, 9), torch.randn(4, 9), torch.randn(9)
    total = x.double() + residual.double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight.double() + offset)
    out, summed = add_rms_norm(x, residual, weight, 1e-3, offset)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(summed, x + residual)
    assert torch.equal(out, rms_norm(summed, weight, 1e-3, offset))


@pytest.mark.interpret
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "dim", "heads"), SHAPES)
def test_kernel_interpreted(rows: int, dim: int, heads: int | None, offset: float) -> None:
    """Planted faults: the row's place without its head; the mean over the padded block; a store without mask."""
    from aspire.testing.model_op_checks import check_rms_norm

    check_rms_norm(rows, dim, heads, offset, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "dim", "heads"), [*SHAPES, (130, 4096, None), (70, 128, 32)])
def test_kernel_on_gpu(rows: int, dim: int, heads: int | None, offset: float, dtype: torch.dtype) -> None:
    """The compiled kernel, in every dtype. Planted fault: a head count that changes the reduction's order."""
    from aspire.testing.model_op_checks import check_rms_norm

    check_rms_norm(rows, dim, heads, offset, dtype, "cuda")
