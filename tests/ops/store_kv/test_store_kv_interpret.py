"""The Triton store under the interpreter."""

import pytest
import torch

from aspire.ops.store_kv.reference import store_kv
from aspire.testing.attention_checks import store_in_eight_bits

pytestmark = pytest.mark.interpret


def test_equals_the_reference_on_strided_input() -> None:
    """Keys and values are views of one fused projection. Planted fault: the value's stride taken for the key's."""
    from aspire.ops.store_kv.triton import store_kv as kernel

    fused = torch.randn(5, 9, 24)
    key, value = fused[:, 2:5], fused[:, 5:8]
    slots = torch.tensor([5, -1, 0, 11, 7])
    expected, found = torch.full((2, 2, 3, 4, 3, 24), torch.nan)
    store_kv(key, value, expected[0], expected[1], slots)
    kernel(key, value, found[0], found[1], slots)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_eight_bit_cache() -> None:
    """Numbers that need no rounding, which Triton 3.6's interpreter does wrongly, some beyond the range.

    Planted faults: no clamp; the key's scale used for the value.
    """
    numbers = torch.randn(2, 8, 3, 24).mul(100.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    numbers[:, 3] *= 16.0
    found, expected = store_in_eight_bits(numbers, 0.5, 4.0)
    assert torch.equal(found, expected)
