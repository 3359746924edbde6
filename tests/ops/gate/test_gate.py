"""gate: reference against the formulas in float64, kernel against the reference."""

import math

import pytest
import torch

from aspire.ops.gate.reference import gate

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_is_the_formula(activation: str) -> None:
    """Planted fault: the halves exchanged."""
    x = torch.randn(3, 10, dtype=torch.float64)
    first, second = x[:, :5], x[:, 5:]
    inner = math.sqrt(2 / math.pi) * (first + 0.044715 * first**3)
    expected = {"silu": first / (1 + torch.exp(-first)), "gelu_tanh": 0.5 * first * (1 + torch.tanh(inner)),
                "gelu": 0.5 * first * (1 + torch.erf(first / math.sqrt(2)))}[activation] * second
    torch.testing.assert_close(gate(x, activation), expected)


@pytest.mark.interpret
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "size"), [(5, 7), (3, 1536), (1, 1025)])
def test_kernel_interpreted(tokens: int, size: int, activation: str) -> None:
    """Planted faults: the second half read at a fixed place; gelu_tanh without the cubic term."""
    from aspire.testing.model_op_checks import check_gate

    check_gate(tokens, size, activation, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "size"), [(5, 7), (130, 1536), (33, 14336)])
def test_kernel_on_gpu(tokens: int, size: int, activation: str, dtype: torch.dtype) -> None:
    """The compiled kernel, in every dtype. Planted fault: exp(x) in place of exp(-x), infinite over infinite."""
    from aspire.testing.model_op_checks import check_gate

    check_gate(tokens, size, activation, dtype, "cuda")
