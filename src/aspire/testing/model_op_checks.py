"""Kernels of the operations between attentions against their references: for tests and the benchmark's gate.

Every check poisons unwritten outputs with NaN, uses rows that differ, and compares a row's bits at several batch sizes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from aspire.ops.gate import reference as gate_reference
from aspire.ops.gate import triton as gate_triton
from aspire.ops.linear import reference as linear_reference
from aspire.ops.linear import triton as linear_triton
from aspire.ops.linear.values import LinearConfig, Tile
from aspire.ops.rms_norm import reference as norm_reference
from aspire.ops.rms_norm import triton as norm_triton
from aspire.ops.rotate import reference as rotate_reference
from aspire.ops.rotate import triton as rotate_triton

# Largest difference over the largest value, one rounding of the dtype and the order of a sum.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Tensors come uninitialised as NaN inside the block."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Raises AssertionError unless every element is within the dtype's tolerance of the largest value beside it."""
    assert out.shape == expected.shape, f"shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
    assert out.dtype == dtype, f"dtype {out.dtype}, expected {dtype}"
    worst = ((out.double() - expected.double()).abs().amax() / expected.double().abs().amax().clamp(min=1e-9)).item()
    assert worst <= TOLERANCE[dtype], f"error {worst:.2e} of the largest value, allowed {TOLERANCE[dtype]:.0e}"


def random_tensor(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Normal numbers, rows of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    scale = torch.linspace(0.5, 2.0, shape[0]).view(-1, *(1 for _ in shape[1:]))
    return (x * scale).to(dtype).to(device)


def check_rows_alone(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The bits of chosen rows of run(x) when they come alone, and in a smaller batch at another place."""
    full = run(x)
    for row in sorted({0, x.shape[0] // 2, x.shape[0] - 1}):
        assert torch.equal(run(x[row:row + 1].clone())[0], full[row]), f"row {row} of {x.shape[0]} differs alone"
    some = x[x.shape[0] // 3:].clone()
    assert torch.equal(run(some), full[x.shape[0] // 3:]), "rows differ in a smaller batch"


def check_rms_norm(rows: int, dim: int, heads: int | None, offset: float, dtype: torch.dtype, device: str) -> None:
    """rms_norm of [rows, dim], or of a head view of a wider tensor; add_rms_norm where there are no heads."""
    weight = random_tensor(dim, seed=1, dtype=dtype, device=device)
    x = random_tensor(rows, dim * ((heads or 0) + 2), seed=2, dtype=dtype, device=device)
    x = x.view(rows, -1, dim)[:, 1:1 + heads] if heads else x[:, :dim]
    with poisoned_memory():
        out = norm_triton.rms_norm(x, weight, 1e-5, offset)
    check_close(out, norm_reference.rms_norm(x, weight, 1e-5, offset), dtype)
    check_rows_alone(lambda y: norm_triton.rms_norm(y, weight, 1e-5, offset), x)
    if heads:
        return
    residual = random_tensor(rows, dim, seed=3, dtype=dtype, device=device)
    with poisoned_memory():
        out, total = norm_triton.add_rms_norm(x, residual, weight, 1e-5, offset)
    expected, expected_total = norm_reference.add_rms_norm(x, residual, weight, 1e-5, offset)
    check_close(out, expected, dtype)
    assert torch.equal(total, expected_total), "the sum is rounded as the reference rounds it"


def check_rotate(tokens: int, heads: int, kv_heads: int, dim: int, half: int, *, dtype: torch.dtype,
                 device: str) -> None:
    """rotate of query and key as views of one tensor; the bits are the reference's."""
    x = random_tensor(tokens, (heads + 2 * kv_heads) * dim, seed=4, dtype=dtype, device=device)
    angles = random_tensor(tokens, half, seed=5, dtype=torch.float32, device=device) * 30
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def split(y: Tensor) -> tuple[Tensor, Tensor]:
        query, key, _ = y.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
        return query, key

    with poisoned_memory():
        outs = rotate_triton.rotate(*split(x), cos, sin)
    for out, expected in zip(outs, rotate_reference.rotate(*split(x), cos, sin), strict=True):
        assert out.is_contiguous()
        check_close(out, expected, dtype)
        assert torch.equal(out, expected), "bits differ from the reference"


def check_gate(tokens: int, size: int, activation: str, dtype: torch.dtype, device: str) -> None:
    """gate of [tokens, 2 * size]; some inputs are large enough to overflow a naive exponential."""
    x = random_tensor(tokens, 2 * size, seed=6, dtype=dtype, device=device)
    x[:, 0], x[:, -1] = -200.0, 1.0
    x[:, 1 % size] = 120.0
    with poisoned_memory():
        out = gate_triton.gate(x, activation)
    check_close(out, gate_reference.gate(x, activation), dtype)
    check_rows_alone(lambda y: gate_triton.gate(y, activation), x)


def check_linear(rows: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype, device: str) -> None:
    """linear against the product in float64, and its rows' bits at several batch sizes."""
    weight = random_tensor(outputs, inputs, seed=7, dtype=dtype, device=device)
    x = random_tensor(rows, inputs, seed=8, dtype=dtype, device=device)
    b = random_tensor(outputs, seed=9, dtype=dtype, device=device) * 3 if bias else None
    linear = linear_triton.Linear(torch.device(device))
    with poisoned_memory():
        out = linear(x, weight, b)
    check_close(out, exact_product(x, weight, b), dtype)
    check_rows_alone(lambda y: linear(y, weight, b), x)


def check_linear_tile(rows: int, outputs: int, inputs: int, *, config: LinearConfig, tile: Tile, dtype: torch.dtype,
                      device: str) -> Tensor:
    """One tile shape against the product in float64, twice in a row (counters come back to zero); its output."""
    weight = random_tensor(outputs, inputs, seed=10, dtype=dtype, device=device)
    x = random_tensor(rows, inputs, seed=11, dtype=dtype, device=device)
    bias = random_tensor(outputs, seed=12, dtype=dtype, device=device) * 3
    arrivals = torch.zeros(linear_triton.MAX_SPLIT_TILES, dtype=torch.int32, device=device)
    with poisoned_memory():
        out = linear_triton.launch(x, weight, bias, arrivals, config, tile)
        again = linear_triton.launch(x, weight, bias, arrivals, config, tile)
    check_close(out, exact_product(x, weight, bias), dtype)
    assert torch.equal(out, again), "a second call differs"
    assert not arrivals.any(), "counters are left behind"
    return out


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
