"""linear: kernel against a float64 product; a row's bits for any number of rows and any tile shape."""

import pytest
import torch

from aspire.ops.linear.configs import choose_config, fit_tile, split_inputs
from aspire.ops.linear.reference import linear
from aspire.ops.linear.values import GRAIN, Loads, Tile

SHAPES = ((5, 33, 70, True), (3, 20, 600, False), (34, 32, 1024, True), (1, 17, 576, True))  # rows, N, K, bias
GPU_SHAPES = (*SHAPES, (150, 640, 4096, True), (400, 960, 576, True), (3, 70, 1100, False))
MODELS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (960, 576), (576, 576),
          (3072, 576), (576, 1536), (49152, 576))  # (N, K) of Llama-3.1-8B and SmolLM2-135M


def test_reference_is_the_product() -> None:
    """Planted fault: the bias left out."""
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    expected = (x[:, None] * weight).sum(-1) + bias
    torch.testing.assert_close(linear(x, weight, bias), expected)


@pytest.mark.parametrize(("outputs", "inputs"), [*MODELS, (1, 1), (7, 130), (100, 100_000)])
def test_chunks_cover_the_inputs_once(outputs: int, inputs: int) -> None:
    """Planted fault: the number of splits not recomputed from the rounded chunk."""
    splits, chunk = split_inputs(outputs, inputs)
    assert chunk % GRAIN == 0
    assert (splits - 1) * chunk < inputs <= splits * chunk
    config = choose_config(outputs, inputs)
    assert (config.splits - 1) * config.chunk < inputs <= config.splits * config.chunk
    assert config.chunk % GRAIN == 0
    assert all(GRAIN % tile.depth == 0 for _, tile in config.tiles)
    assert [limit for limit, _ in config.tiles] == sorted(limit for limit, _ in config.tiles)
    assert config.tiles[-1][0] >= 1 << 20, "a tile for any number of rows"


@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10, 227 << 10], ids=["sm86", "sm80", "sm90"])
@pytest.mark.parametrize(("outputs", "inputs"), MODELS)
def test_tiles_fit_other_gpus(outputs: int, inputs: int, shared_bytes: int) -> None:
    """Planted fault: the extra tokens left out of a stage's bytes."""
    for _, tile in choose_config(outputs, inputs).tiles:
        fitted = fit_tile(tile, shared_bytes, "pointers")
        assert fitted.loads == "pointers"
        stage = 2 * fitted.depth * (fitted.weights + fitted.tokens + fitted.extra)
        assert fitted.stages * stage <= shared_bytes


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "outputs", "inputs", "bias"), SHAPES)
def test_kernel_interpreted(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    """Planted faults: the last chunk not cut at K; counters not reset; the bias added in the output's dtype."""
    from aspire.testing.model_op_checks import check_linear

    check_linear(rows, outputs, inputs, bias, torch.float32, "cpu")


LOADS: tuple[Loads, ...] = ("pointers", "descriptors")
TILES: tuple[tuple[bool, Loads, int], ...] = tuple(
    (spread, loads, extra) for spread in (True, False) for loads in LOADS for extra in (0, 16))


@pytest.mark.interpret
@pytest.mark.parametrize(("splits", "inputs"), [(1, 328), (2, 768), (3, 840)])
def test_every_path_interpreted(splits: int, inputs: int) -> None:
    """Every path gives the same bits. Planted faults: token tiles of a short last group mapped to the group before;
    the extra tokens' chunks stored over the others'; chunks added from the last to the first in one path."""
    from aspire.ops.linear.values import LinearConfig
    from aspire.testing.model_op_checks import check_linear_tile

    config = LinearConfig(splits, -(-inputs // splits // GRAIN) * GRAIN, ())
    outs = [check_linear_tile(40, 48, inputs, config=config, dtype=torch.float32, device="cpu",
                              tile=Tile(32, 16, depth, 4, 2, spread=spread, loads=loads, extra=extra, group=2))
            for depth, (spread, loads, extra) in zip((64, 32) * 4, TILES, strict=True)]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.interpret
def test_library_is_used_where_its_bits_are_the_same() -> None:
    """Planted faults: numbers of rows with other bits kept; a choice without a bias used with one."""
    from aspire.ops.linear.triton import Linear

    weight, bias, seen = torch.randn(17, 40), torch.randn(17), []
    plain = Linear(torch.device("cpu"))

    def library(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        seen.append(x.shape[0])
        out = plain(x, w, b)
        return out.nextafter(out + 1) if x.shape[0] == 3 else out

    product = Linear(torch.device("cpu"), library)
    assert product.use_library(weight, None, (2, 3, 5)) == [2, 5]
    seen.clear()
    for rows in (2, 3, 4, 5):
        x = torch.randn(rows, 40)
        assert torch.equal(product(x, weight, None), plain(x, weight, None))
        assert torch.equal(product(x, weight, bias), plain(x, weight, bias))
    assert seen == [2, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("splits", "inputs"), [(1, 328), (2, 768), (3, 840)])
def test_every_tile_gives_the_same_bits(splits: int, inputs: int, dtype: torch.dtype) -> None:
    """Planted faults: chunks added in the order of arrival; a depth that does not divide the chunk."""
    from aspire.ops.linear.values import LinearConfig
    from aspire.testing.model_op_checks import check_linear_tile

    config = LinearConfig(splits, -(-inputs // splits // GRAIN) * GRAIN, ())
    outs = [check_linear_tile(300, 208, inputs, config=config, dtype=dtype, device="cuda",
                              tile=Tile(weights, tokens, depth, warps, 2, spread, loads, extra, 2))
            for spread, loads, extra in TILES
            for weights, tokens, depth, warps in ((64, 16, 128, 4), (128, 128, 64, 8), (64, 64, 32, 4))]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "bias"), GPU_SHAPES)
def test_kernel_on_gpu(rows: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    """The compiled kernel, in every dtype. Planted fault: splits that follow M."""
    from aspire.testing.model_op_checks import check_linear

    check_linear(rows, outputs, inputs, bias, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [m for m in MODELS if m[0] < 50_000])
def test_bits_do_not_depend_on_the_number_of_rows(outputs: int, inputs: int) -> None:
    """Every tile of every model shape gives a row the same bits. Planted fault: one tile with another chunk."""
    from aspire.ops.linear.triton import Linear
    from aspire.testing.model_op_checks import random_tensor

    weight = random_tensor(outputs, inputs, seed=1, dtype=torch.bfloat16, device="cuda")
    x = random_tensor(1100, inputs, seed=2, dtype=torch.bfloat16, device="cuda")
    product = Linear(torch.device("cuda"))
    full = product(x, weight, None)
    for rows in (1, 2, 7, 16, 17, 32, 33, 64, 65, 100, 128, 129, 192, 256, 257, 500, 513, 1024):
        start = (1100 - rows) // 3
        assert torch.equal(product(x[start:start + rows], weight, None), full[start:start + rows]), f"{rows} rows"
