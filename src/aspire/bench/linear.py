"""The batch-invariant linear and the operators between the GEMMs on this GPU, against torch's, at models' shapes.

`python -m aspire.bench.linear table` compares linear and tells whether the library's own bits depend on the number of
rows; `between` times the other operators. Bits of ours that depend on the number of rows end the run. Times are medians
of graph replays over weights larger than the L2 cache.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire.ops.gate import reference as gate_reference
from aspire.ops.gate import triton as gate_triton
from aspire.ops.linear.triton import Linear
from aspire.ops.rms_norm import reference as norm_reference
from aspire.ops.rms_norm import triton as norm_triton
from aspire.ops.rotate import reference as rotate_reference
from aspire.ops.rotate import triton as rotate_triton

SHAPES = {  # (N, K): qkv, o, gate_up, down, head
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "smollm2-135m": ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)),
    "qwen3-8b": ((24576, 4096), (4096, 12288), (151936, 4096)),  # the others are Llama's
    "qwen3-1.7b": ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144), (151936, 2048)),
}
ROWS = (1, 16, 32, 64, 96, 128, 192, 256, 512)
MANY_ROWS = (2048, 8192)
ROTATED_BYTES = 160 << 20


def time_calls(call: Callable[[Tensor], object], weights: Sequence[Tensor], replays: int = 5) -> float:
    """Milliseconds of one call: the median replay of a graph that calls it once per weight tensor."""
    call(weights[0])
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):  # without torch.cuda.graph's garbage collection, of 0.1 s
        graph.capture_begin()
        for weight in weights:
            call(weight)
        graph.capture_end()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(weights))
    return float(statistics.median(times))


@dataclass(frozen=True, slots=True)
class Problem:
    """Weights of one shape, in copies that together exceed the L2 cache, and rows that differ."""

    outputs: int
    inputs: int
    weights: tuple[Tensor, ...]
    x: Tensor  # [8192, inputs]


def make_problem(outputs: int, inputs: int, rows: int) -> Problem:
    copies = max(2, -(-ROTATED_BYTES // (outputs * inputs * 2)))
    generator = torch.Generator("cuda").manual_seed(outputs + inputs)
    first = torch.randn(outputs, inputs, device="cuda", generator=generator).bfloat16() * inputs**-0.5
    x = torch.randn(rows, inputs, device="cuda", generator=generator).bfloat16()
    return Problem(outputs, inputs, (first, *(first.clone() for _ in range(copies - 1))), x)


def library_invariance(problem: Problem) -> dict[int, bool]:
    """For each number of rows: whether the library's linear gives them the bits of the same rows among 1024."""
    weight, x = problem.weights[0], problem.x[:1024]
    full = F.linear(x, weight)
    counts = (1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 192, 256, 512)
    return {m: bool(torch.equal(F.linear(x[:m], weight), full[:m])) for m in counts}


def table(_args: argparse.Namespace) -> None:
    """The configured operator against the library: ms, TB/s of weights, TFLOP/s; and its bits at every M."""
    linear = Linear(torch.device("cuda"))
    for name, shapes in SHAPES.items():
        for shape in shapes:
            problem = make_problem(*shape, max(MANY_ROWS))
            print(json.dumps({"model": name, "shape": shape, "library": library_invariance(problem)}), flush=True)
            full = linear(problem.x[:max(ROWS)], problem.weights[0], None)
            for rows in (*ROWS, *(MANY_ROWS if shape[0] < 40_000 else ())):
                out = linear(problem.x[:rows], problem.weights[0], None)
                assert torch.equal(out[:max(ROWS)], full[:rows]), f"bits differ at {rows} rows"
                print(json.dumps({"model": name, "shape": shape, **compare(problem, rows, linear)}), flush=True)


def compare(problem: Problem, rows: int, linear: Linear) -> dict[str, float]:
    """One line of the table."""
    x, size = problem.x[:rows], problem.outputs * problem.inputs
    weights = problem.weights[:2] if rows > 1024 else problem.weights
    ours = time_calls(partial(linear, x, bias=None), weights)
    library = time_calls(partial(F.linear, x), weights)
    same = torch.equal(linear(x, weights[0], None), F.linear(x, weights[0]))
    return {"rows": rows, "library_same": same, "us": round(1000 * ours, 2), "library_us": round(1000 * library, 2),
            "ratio": round(ours / library, 3), "TBps": round(size * 2 / ours / 1e9, 2),
            "TFLOPps": round(2 * rows * size / ours / 1e9, 1)}


def between(_args: argparse.Namespace) -> None:
    """The operators between the GEMMs against their references, at Llama-3.1-8B's shape, in microseconds."""
    for rows in (1, 64, 128, 2048):
        for name, ours, reference in operator_pairs(rows):
            times = [round(1000 * time_calls(partial(ignore_weight, call), [torch.empty(0)] * 50), 2)
                     for call in (ours, reference)]
            print(json.dumps({"operator": name, "rows": rows, "us": times[0], "reference_us": times[1]}), flush=True)


def ignore_weight(call: Callable[[], object], _weight: Tensor) -> object:
    return call()


def operator_pairs(rows: int) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """(name, kernel, reference)."""
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, residual, weight, heads, gate_up = (normal(rows, 4096), normal(rows, 4096), normal(4096), normal(rows, 48, 128),
                                           normal(rows, 28672))
    query, key, angles = heads[:, :32], heads[:, 32:40], normal(rows, 64)
    yield ("add_rms_norm", lambda: norm_triton.add_rms_norm(x, residual, weight, 1e-5, 0.0),
           lambda: norm_reference.add_rms_norm(x, residual, weight, 1e-5, 0.0))
    yield ("rms_norm of heads", lambda: norm_triton.rms_norm(query, weight[:128], 1e-5, 0.0),
           lambda: norm_reference.rms_norm(query, weight[:128], 1e-5, 0.0))
    yield ("rotate", lambda: rotate_triton.rotate(query, key, angles, angles),
           lambda: rotate_reference.rotate(query, key, angles, angles))
    yield "gate", lambda: gate_triton.gate(gate_up, "silu"), lambda: gate_reference.gate(gate_up, "silu")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("table").set_defaults(run=table)
    commands.add_parser("between").set_defaults(run=between)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
