"""The Triton store under the interpreter."""

import pytest
import torch

from aspire.ops.store_kv.reference import store_kv

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
