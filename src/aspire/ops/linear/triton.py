"""linear on CUDA, batch-invariant: a row's bits depend on its values and the weights alone, for any number of rows.

The matrix unit gets the weights as its left operand, so that few tokens waste little of it. K is cut into chunks fixed
by (N, K); every chunk is summed from zero in the same order whatever the tile, and the chunks are added in their order,
either by one program or by the last of several programs to arrive. Tiles may thus follow M: their shape moves no bit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aspire.ops.linear.configs import choose_config, choose_tile, fit_tile
from aspire.ops.linear.values import GRAIN, LinearConfig, Loads, Tile

Library = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]

MAX_SPLIT_TILES = 1 << 15  # output tiles of one call whose chunks go to different programs


@triton.jit
def add_chunk(
    acc, more, x, x_more, weight,  # acc float32 [BW, BT], more float32 [BW, EXTRA]
    first, last, w, start, num_rows, outputs, inputs, x_stride,
    BW: tl.constexpr, BT: tl.constexpr, EXTRA: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, GRAIN: tl.constexpr, DESCRIPTORS: tl.constexpr,
):
    """acc and more + weight rows times tokens from `start` over inputs [first * GRAIN, last)."""
    if DESCRIPTORS:
        for k in range(first * GRAIN, last, BK):
            a = weight.load([w * BW, k])
            acc = tl.dot(a, x.load([start, k]).T, acc, input_precision=PRECISION)
            if EXTRA > 0:
                more = tl.dot(a, x_more.load([start + BT, k]).T, more, input_precision=PRECISION)
    else:
        rows = w * BW + tl.arange(0, BW)
        tokens = start + tl.arange(0, BT)
        i = tl.arange(0, BK)
        weight_at = weight + rows.to(tl.int64)[:, None] * inputs + i[None, :]
        x_at = x + tokens.to(tl.int64)[None, :] * x_stride + i[:, None]
        if EXTRA > 0:
            tokens_more = start + BT + tl.arange(0, EXTRA)
            x_more_at = x + tokens_more.to(tl.int64)[None, :] * x_stride + i[:, None]
        for k in range(first * GRAIN, last, BK):
            if EVEN:
                a = tl.load(weight_at + k)
                b = tl.load(x_at + k, mask=(tokens < num_rows)[None, :], other=0.0)
            else:
                inside = k + i < last
                a = tl.load(weight_at + k, mask=(rows < outputs)[:, None] & inside[None, :], other=0.0)
                b = tl.load(x_at + k, mask=(tokens < num_rows)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            if EXTRA > 0:
                c = tl.load(x_more_at + k, mask=(tokens_more < num_rows)[None, :] & (k + i < last)[:, None], other=0.0)
                more = tl.dot(a, c, more, input_precision=PRECISION)
    return acc, more


@triton.jit
def store_partial(to, acc, BW: tl.constexpr, BT: tl.constexpr):
    """acc [BW, BT] to `to`; rows and tokens beyond the product are zeros. Without a mask the stores are wide."""
    tl.store(to + tl.arange(0, BW)[:, None] * BT + tl.arange(0, BT)[None, :], acc)


@triton.jit
def sum_partials(first, stride, splits, BW: tl.constexpr, BT: tl.constexpr):
    """The sum in their order of `splits` stored [BW, BT], `stride` apart."""
    at = first + tl.arange(0, BW)[:, None] * BT + tl.arange(0, BT)[None, :]
    total = tl.zeros([BW, BT], dtype=tl.float32)
    for part in range(splits):
        total += tl.load(at + part * stride, cache_modifier=".cg")
    return total


@triton.jit
def store_product(out, total, bias, first_token, w, num_rows, outputs, BW: tl.constexpr, BT: tl.constexpr):
    """total [BW, BT], plus bias, to out [num_rows, outputs]."""
    rows = w * BW + tl.arange(0, BW)
    tokens = first_token + tl.arange(0, BT)
    if bias is not None:
        total += tl.load(bias + rows, mask=rows < outputs, other=0.0).to(tl.float32)[:, None]
    to = out + tokens.to(tl.int64)[None, :] * outputs + rows[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=(tokens < num_rows)[None, :] & (rows < outputs)[:, None])


@triton.jit(do_not_specialize=["num_rows", "splits", "chunk"])
def linear_kernel(
    x,  # [num_rows, inputs], or its descriptor of blocks [BT, BK]
    x_more,  # the descriptor of blocks [EXTRA, BK], or None
    weight,  # [outputs, inputs], or its descriptor of blocks [BW, BK]
    bias,  # [outputs] or None
    out,  # [num_rows, outputs]
    partials,  # float32 [tiles, splits, BW * (BT + EXTRA)]; SPREAD only
    arrivals,  # int32 [tiles], zero before and after; SPREAD only
    num_rows, outputs, inputs, x_stride, splits, chunk,  # chunk in units of GRAIN inputs
    SPLIT: tl.constexpr, SPREAD: tl.constexpr, GROUP: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr,
    EXTRA: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, GRAIN: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """SPLIT: there are several chunks. SPREAD: each has a program of its own (program axis 1).

    A tile is BW outputs of BT + EXTRA tokens: two products share the weights, for widths between powers of two.
    """
    token_tiles = (num_rows + BT + EXTRA - 1) // (BT + EXTRA)
    weight_tiles = (outputs + BW - 1) // BW
    tile = tl.program_id(0)
    # Token tiles of a group first: they share a weight tile in the L2 cache.
    group = tile // (GROUP * weight_tiles)
    place = tile % (GROUP * weight_tiles)
    width = tl.minimum(token_tiles - group * GROUP, GROUP)
    start = (group * GROUP + place % width) * (BT + EXTRA)
    w = place // width
    zero = tl.zeros([BW, BT], dtype=tl.float32)
    zero_more = tl.zeros([BW, EXTRA if EXTRA > 0 else 16], dtype=tl.float32)
    if not SPLIT:
        total, more = add_chunk(zero, zero_more, x, x_more, weight, 0, inputs, w, start, num_rows, outputs, inputs,
                                x_stride, BW, BT, EXTRA, BK, EVEN, PRECISION, GRAIN, DESCRIPTORS)
    elif not SPREAD:
        total = zero
        more = zero_more
        for s in range(splits):
            acc, acc_more = add_chunk(zero, zero_more, x, x_more, weight, s * chunk,
                                      tl.minimum((s + 1) * chunk * GRAIN, inputs), w, start, num_rows, outputs, inputs,
                                      x_stride, BW, BT, EXTRA, BK, EVEN, PRECISION, GRAIN, DESCRIPTORS)
            total += acc
            if EXTRA > 0:
                more += acc_more
    else:
        s = tl.program_id(1)
        acc, acc_more = add_chunk(zero, zero_more, x, x_more, weight, s * chunk,
                                  tl.minimum((s + 1) * chunk * GRAIN, inputs), w, start, num_rows, outputs, inputs,
                                  x_stride, BW, BT, EXTRA, BK, EVEN, PRECISION, GRAIN, DESCRIPTORS)
        size: tl.constexpr = BW * (BT + EXTRA)
        first = partials + tile.to(tl.int64) * splits * size
        store_partial(first + s * size, acc, BW, BT)
        if EXTRA > 0:
            store_partial(first + s * size + BW * BT, acc_more, BW, EXTRA)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") != splits - 1:
            return
        total = sum_partials(first, size, splits, BW, BT)
        if EXTRA > 0:
            more = sum_partials(first + BW * BT, size, splits, BW, EXTRA)
        tl.store(arrivals + tile, 0)
    store_product(out, total, bias, start, w, num_rows, outputs, BW, BT)
    if EXTRA > 0:
        store_product(out, more, bias, start + BT, w, num_rows, outputs, BW, EXTRA)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, arrivals: Tensor, config: LinearConfig,
           tile: Tile) -> Tensor:
    """The product by one tile shape. arrivals: int32, zeros, one per output tile at least; zeros again afterwards."""
    (num_rows, inputs), outputs = x.shape, weight.shape[0]
    assert GRAIN % tile.depth == 0, "a chunk is whole steps"
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    width = tile.tokens + tile.extra
    tiles = triton.cdiv(num_rows, width) * triton.cdiv(outputs, tile.weights)
    spread = tile.spread and config.splits > 1
    partials = None
    if spread:
        assert tiles <= arrivals.numel(), f"{tiles} tiles, {arrivals.numel()} counters"
        partials = torch.empty(tiles, config.splits, tile.weights * width, dtype=torch.float32, device=x.device)
    described = tile.loads == "descriptors" and inputs % 8 == 0 and x.stride(0) % 8 == 0  # 16-byte rows
    x_in, x_more, weight_in = describe(x, weight, tile) if described else (x, None, weight)
    even = described or (outputs % tile.weights == 0 and inputs % tile.depth == 0)
    linear_kernel[(tiles, config.splits if spread else 1)](
        x_in, x_more, weight_in, bias, out, partials, arrivals if spread else None, num_rows, outputs, inputs,
        x.stride(0), config.splits, config.chunk // GRAIN, SPLIT=config.splits > 1, SPREAD=spread, GROUP=tile.group,
        BW=tile.weights, BT=tile.tokens, EXTRA=tile.extra, BK=tile.depth, EVEN=even,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", GRAIN=GRAIN, DESCRIPTORS=described,
        num_warps=tile.warps, num_stages=tile.stages)
    return out


def describe(x: Tensor, weight: Tensor, tile: Tile) -> tuple[TensorDescriptor, TensorDescriptor | None,
                                                             TensorDescriptor]:
    """Descriptors of x in blocks of tokens, in blocks of extra tokens, and of the weights."""
    return (TensorDescriptor.from_tensor(x, [tile.tokens, tile.depth]),
            TensorDescriptor.from_tensor(x, [tile.extra, tile.depth]) if tile.extra else None,
            TensorDescriptor.from_tensor(weight, [tile.weights, tile.depth]))


@dataclass(frozen=True, slots=True)
class Call:
    """What decides how a product is computed."""

    outputs: int
    inputs: int
    num_rows: int
    dtype: torch.dtype
    has_bias: bool


class Linear:
    """The operator with its counters, for calls that follow each other on one stream. Safe to capture in a graph."""

    def __init__(self, device: torch.device, library: Library = F.linear) -> None:
        self._arrivals = torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)
        self._choices: dict[Call, tuple[LinearConfig, Tile]] = {}
        self._library = library
        self._by_library: set[Call] = set()  # membership only
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
        call = Call(weight.shape[0], weight.shape[1], x.shape[0], x.dtype, bias is not None)
        if call in self._by_library and x.is_contiguous():
            return self._library(x, weight, bias)
        if call not in self._choices:
            self._choices[call] = self._choose(call)
        return launch(x, weight, bias, self._arrivals, *self._choices[call])

    def use_library(self, weight: Tensor, bias: Tensor | None, rows: Iterable[int]) -> list[int]:
        """From now on compute products of these numbers of rows by the library where it gives this operator's bits.

        Returns those numbers. The library picks its algorithm by shape, so each number is tried, on random rows, every
        output compared. It is the faster one for many rows, but splits K of narrow deep weights in its own ways.
        Synchronises: for the time before capture.
        """
        generator = torch.Generator(weight.device).manual_seed(weight.shape[0])
        kept = []
        for num_rows in rows:
            x = torch.randn(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.device, generator=generator)
            call = Call(weight.shape[0], weight.shape[1], num_rows, weight.dtype, bias is not None)
            self._by_library.discard(call)
            if torch.equal(self(x, weight, bias), self._library(x, weight, bias)):
                self._by_library.add(call)
                kept.append(num_rows)
        return kept

    def _choose(self, call: Call) -> tuple[LinearConfig, Tile]:
        config = choose_config(call.outputs, call.inputs)
        return config, fit_tile(choose_tile(config, call.num_rows, call.dtype), self._shared_bytes, self._loads)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See reference.py. Makes its counters anew, one more launch: for single calls. Use Linear for many."""
    return Linear(x.device)(x, weight, bias)
