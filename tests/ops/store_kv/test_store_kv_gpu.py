"""The compiled store on a GPU."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_eight_bit_cache_is_equal_to_the_bit() -> None:
    """What a policy drafts and what it verifies must have been rounded alike. The reference once divided by the scale
    where the kernel multiplies by its inverse, which differs in some bits."""
    from aspire.testing.attention_checks import store_in_eight_bits

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need compute capability 8.9")
    sizes = torch.tensor([1e-3, 1e-2, 1e-1, 1.0, 10.0, 1e2, 1e3, 1e38], device="cuda")[:, None, None]
    numbers = torch.randn(2, 8, 3, 24, device="cuda") * sizes
    for dtype in (torch.float32, torch.bfloat16):
        found, expected = store_in_eight_bits(numbers.to(dtype), 0.3, 3.0)
        assert torch.equal(found, expected)
