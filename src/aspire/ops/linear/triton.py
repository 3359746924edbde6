"""linear on CUDA, batch-invariant: a row's bits depend on its values and the weights alone, for any number of rows.

The matrix unit gets the weights as its left operand, so that few tokens waste little of it. K is cut into chunks fixed
by (N, K); every chunk is summed from zero in the same order whatever the tile, and the chunks are added in their order,
either by one program or by the last of several programs to arrive. Tiles may thus follow M: their shape moves no bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aspire.ops.linear.configs import GRAIN, LinearConfig, Loads, Tile, choose_config, choose_tile, fit_tile

MAX_SPLIT_TILES = 1 << 15  # output tiles of one call whose chunks go to different programs


@triton.jit
def add_chunk(
    acc, x, weight,  # acc float32 [BW, BT]
    first, last, w, t, num_rows, outputs, inputs, x_stride,
    BW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    GRAIN: tl.constexpr, DESCRIPTORS: tl.constexpr,
):
    """acc + weight rows times tokens over inputs [first * GRAIN, last)."""
    if DESCRIPTORS:
        for k in range(first * GRAIN, last, BK):
            acc = tl.dot(weight.load([w * BW, k]), x.load([t * BT, k]).T, acc, input_precision=PRECISION)
    else:
        rows = w * BW + tl.arange(0, BW)
        tokens = t * BT + tl.arange(0, BT)
        i = tl.arange(0, BK)
        weight_at = weight + rows.to(tl.int64)[:, None] * inputs + i[None, :]
        x_at = x + tokens.to(tl.int64)[None, :] * x_stride + i[:, None]
        for k in range(first * GRAIN, last, BK):
            if EVEN:
                a = tl.load(weight_at + k)
                b = tl.load(x_at + k, mask=(tokens < num_rows)[None, :], other=0.0)
            else:
                inside = k + i < last
                a = tl.load(weight_at + k, mask=(rows < outputs)[:, None] & inside[None, :], other=0.0)
                b = tl.load(x_at + k, mask=(tokens < num_rows)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_rows", "splits", "chunk"])
def linear_kernel(
    x,  # [num_rows, inputs], or its descriptor of blocks [BT, BK]
    weight,  # [outputs, inputs], or its descriptor of blocks [BW, BK]
    bias,  # [outputs] or None
    out,  # [num_rows, outputs]
    partials,  # float32 [tiles, splits, BW, BT]; SPREAD only
    arrivals,  # int32 [tiles], zero before and after; SPREAD only
    num_rows, outputs, inputs, x_stride, splits, chunk,  # chunk in units of GRAIN inputs
    SPLIT: tl.constexpr, SPREAD: tl.constexpr, GROUP: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, GRAIN: tl.constexpr, DESCRIPTORS: tl.constexpr,
):
    """SPLIT: there are several chunks. SPREAD: each has a program of its own (program axis 1)."""
    token_tiles = (num_rows + BT - 1) // BT
    weight_tiles = (outputs + BW - 1) // BW
    tile = tl.program_id(0)
    # Token tiles of a group first: they share a weight tile in the L2 cache.
    group = tile // (GROUP * weight_tiles)
    place = tile % (GROUP * weight_tiles)
    width = tl.minimum(token_tiles - group * GROUP, GROUP)
    t = group * GROUP + place % width
    w = place // width
    rows = w * BW + tl.arange(0, BW)
    tokens = t * BT + tl.arange(0, BT)
    zero = tl.zeros([BW, BT], dtype=tl.float32)
    if not SPLIT:
        total = add_chunk(zero, x, weight, 0, inputs, w, t, num_rows, outputs, inputs, x_stride, BW, BT, BK, EVEN,
                          PRECISION, GRAIN, DESCRIPTORS)
    elif not SPREAD:
        total = zero
        for s in range(splits):
            total += add_chunk(zero, x, weight, s * chunk, tl.minimum((s + 1) * chunk * GRAIN, inputs), w, t, num_rows,
                               outputs, inputs, x_stride, BW, BT, BK, EVEN, PRECISION, GRAIN, DESCRIPTORS)
    else:
        s = tl.program_id(1)
        acc = add_chunk(zero, x, weight, s * chunk, tl.minimum((s + 1) * chunk * GRAIN, inputs), w, t, num_rows,
                        outputs, inputs, x_stride, BW, BT, BK, EVEN, PRECISION, GRAIN, DESCRIPTORS)
        at = tl.arange(0, BW)[:, None] * BT + tl.arange(0, BT)[None, :]
        mine = partials + tile.to(tl.int64) * splits * (BW * BT)
        used = (tokens < num_rows)[None, :] & (rows < outputs)[:, None]
        tl.store(mine + s * (BW * BT) + at, acc, mask=used)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") != splits - 1:
            return
        total = zero
        for part in range(splits):
            total += tl.load(mine + part * (BW * BT) + at, mask=used, other=0.0, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    if bias is not None:
        total += tl.load(bias + rows, mask=rows < outputs, other=0.0).to(tl.float32)[:, None]
    to = out + tokens.to(tl.int64)[None, :] * outputs + rows[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=(tokens < num_rows)[None, :] & (rows < outputs)[:, None])


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, arrivals: Tensor, config: LinearConfig,
           tile: Tile) -> Tensor:
    """The product by one tile shape. arrivals: int32, zeros, one per output tile at least; zeros again afterwards."""
    (num_rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(num_rows, tile.tokens) * triton.cdiv(outputs, tile.weights)
    spread = tile.spread and config.splits > 1
    partials = None
    if spread:
        assert tiles <= arrivals.numel(), f"{tiles} tiles, {arrivals.numel()} counters"
        partials = torch.empty(tiles, config.splits, tile.weights, tile.tokens, dtype=torch.float32, device=x.device)
    described = tile.loads == "descriptors" and inputs % 8 == 0 and x.stride(0) % 8 == 0  # 16-byte rows
    even = outputs % tile.weights == 0 and inputs % tile.depth == 0
    linear_kernel[(tiles, config.splits if spread else 1)](
        TensorDescriptor.from_tensor(x, [tile.tokens, tile.depth]) if described else x,
        TensorDescriptor.from_tensor(weight, [tile.weights, tile.depth]) if described else weight,
        bias, out, partials, arrivals if spread else None, num_rows, outputs, inputs, x.stride(0), config.splits,
        config.chunk // GRAIN, SPLIT=config.splits > 1, SPREAD=spread, GROUP=tile.group, BW=tile.weights,
        BT=tile.tokens, BK=tile.depth, EVEN=even, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        GRAIN=GRAIN, DESCRIPTORS=described, num_warps=tile.warps, num_stages=tile.stages)
    return out


class Linear:
    """The operator with its counters, for calls that follow each other on one stream. Safe to capture in a graph."""

    def __init__(self, device: torch.device) -> None:
        self._arrivals = torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)
        self._choices: dict[tuple[int, int, int, torch.dtype], tuple[LinearConfig, Tile]] = {}
        self._shared_bytes = 1 << 20
        self._loads: Loads = "descriptors"
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
            self._loads = "descriptors" if properties.major >= 9 else "pointers"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See reference.py. x may have any row stride; weight is contiguous."""
        assert x.stride(1) == 1, "a row is contiguous"
        assert weight.is_contiguous(), "weights are contiguous"
        if x.shape[0] == 0:
            return x.new_empty(0, weight.shape[0])
        key = (*weight.shape, x.shape[0], x.dtype)
        if key not in self._choices:
            self._choices[key] = self._choose(*key)
        return launch(x, weight, bias, self._arrivals, *self._choices[key])

    def _choose(self, outputs: int, inputs: int, num_rows: int, dtype: torch.dtype) -> tuple[LinearConfig, Tile]:
        config = choose_config(outputs, inputs)
        return config, fit_tile(choose_tile(config, num_rows, dtype), self._shared_bytes, self._loads)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See reference.py. Makes its counters anew, one more launch: for single calls. Use Linear for many."""
    return Linear(x.device)(x, weight, bias)
