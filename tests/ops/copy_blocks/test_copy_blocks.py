"""copy_blocks: bytes move unchanged, whatever they mean, between layers in tensors of their own and one buffer."""

import pytest
import torch

from aspire.ops.copy_blocks.reference import copy_blocks
from aspire.ops.copy_blocks.store import store_of_buffer, store_of_layers
from aspire.testing.block_checks import check_round_trip

CASES = [(torch.float32, (16, 3, 64)), (torch.bfloat16, (1, 1, 4)), (torch.float8_e4m3fn, (3, 1, 5)),
         (torch.float8_e4m3fn, (16, 2, 72)), (torch.float16, (7, 5, 37))]
IDS = [f"{dtype}-{size}".removeprefix("torch.") for dtype, size in CASES]


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=IDS)
def test_bytes_come_back(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """NaNs and 8-bit floats included. Planted fault: source and target rows exchanged."""
    check_round_trip(copy_blocks, dtype, shape, "cpu")


def test_words_are_wide_where_sizes_allow() -> None:
    """Planted fault: always bytes, which costs the reference a factor of five."""
    assert store_of_layers([torch.zeros(2, 4, 2, 8, dtype=torch.float8_e4m3fn)]).parts[0].dtype == torch.int64
    assert store_of_buffer(torch.zeros(2, 3, 40, dtype=torch.uint8)).words == 5
    assert store_of_buffer(torch.zeros(2, 3, 15, dtype=torch.uint8)).words == 15


def test_parts_of_different_sizes_are_refused() -> None:
    with pytest.raises(AssertionError, match="alike"):
        store_of_layers([torch.zeros(2, 8), torch.zeros(2, 16)])


@pytest.mark.interpret
@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=IDS)
def test_kernel_under_the_interpreter(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Planted faults: the source's stride used for the target; no mask."""
    from aspire.ops.copy_blocks.triton import copy_blocks as kernel

    check_round_trip(kernel, dtype, shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "shape"), [*CASES, (torch.bfloat16, (16, 8, 128))])
def test_kernel_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    from aspire.ops.copy_blocks.triton import copy_blocks as kernel

    check_round_trip(kernel, dtype, shape, "cuda")
