"""The batch-invariant linear on this GPU: tiles and chunks by measurement, and a table against the library.

`python -m aspire.bench.linear measure --out FILE` times every candidate tile and chunk and writes JSON lines;
`python -m aspire.bench.linear table` compares the configured operator with torch's linear,
`between` the operators between the GEMMs with their references. Both refuse to time a kernel
whose result is wrong or whose bits depend on the tile. Times are graph replays over weights larger than the L2 cache.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire.ops.gate import reference as gate_reference
from aspire.ops.gate import triton as gate_triton
from aspire.ops.linear.configs import GRAIN, LinearConfig, Tile
from aspire.ops.linear.triton import MAX_SPLIT_TILES, Linear, launch
from aspire.ops.rms_norm import reference as norm_reference
from aspire.ops.rms_norm import triton as norm_triton
from aspire.ops.rotate import reference as rotate_reference
from aspire.ops.rotate import triton as rotate_triton

SHAPES = {  # (N, K): qkv, o, gate_up, down, head
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "smollm2-135m": ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)),
    "qwen3-8b": ((24576, 4096), (4096, 12288)),  # the others are Llama's
    "qwen3-1.7b": ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)),
}
ROWS = (1, 16, 32, 64, 128, 192, 256, 512)
MANY_ROWS = (1024, 2048, 8192)
ROTATED_BYTES = 160 << 20

# (weights, depth, warps, stages) by tokens
SMALL = {
    16: ((64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (128, 64, 4, 6), (128, 128, 4, 4),
         (128, 128, 8, 4)),
    32: ((64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 6), (128, 128, 4, 4), (128, 128, 8, 4)),
    64: ((64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 5), (128, 64, 8, 5), (128, 128, 8, 3)),
    128: ((64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 64, 8, 3), (128, 128, 8, 3)),
}
LARGE = ((128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3))


def small_tiles(tokens: Sequence[int]) -> Iterator[Tile]:
    """Candidates whose chunks are spread over programs."""
    for t in tokens:
        for weights, depth, warps, stages in SMALL[t]:
            for loads in ("pointers", "descriptors"):
                yield Tile(weights, t, depth, warps, stages, True, loads)


def large_tiles(splits: int) -> Iterator[Tile]:
    """Candidates that add their chunks themselves; two sums of 256 columns do not fit the registers."""
    for weights, tokens, depth, warps, stages in LARGE:
        if splits == 1 or weights * tokens <= 128 * 128:
            for loads in ("pointers", "descriptors"):
                yield Tile(weights, tokens, depth, warps, stages, False, loads)


def compile_tile(task: tuple[Tile, int]) -> str | None:
    """Compile one candidate into the disk cache; the reason if it cannot run."""
    tile, splits = task
    x, weight = (torch.ones(rows, 2 * GRAIN * splits, dtype=torch.bfloat16, device="cuda") for rows in (48, 512))
    try:
        launch(x, weight, None, torch.zeros(1024, dtype=torch.int32, device="cuda"),
               LinearConfig(splits, 2 * GRAIN, ((1 << 30, tile),)), tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def compile_all(tasks: Sequence[tuple[Tile, int]], processes: int) -> list[tuple[Tile, int]]:
    """Compile all candidates in parallel; those that run."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        reasons = list(pool.map(compile_tile, tasks, chunksize=2))
    for task, reason in zip(tasks, reasons, strict=True):
        if reason:
            print("left out", task, reason)
    return [task for task, reason in zip(tasks, reasons, strict=True) if reason is None]


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
    return statistics.median(times)


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


def chunk_options(outputs: int, inputs: int) -> list[int]:
    """Numbers of chunks worth a try: no more than fill the card several times, no chunk under 128 inputs."""
    most = 1600 // -(-outputs // 64)
    chunks = {-(-inputs // s // GRAIN) * GRAIN if s > 1 else -(-inputs // GRAIN) * GRAIN for s in (1, 2, 3, 4, 6, 8)
              if s <= max(1, most)}
    return sorted({-(-inputs // chunk) for chunk in chunks})


def config_of(splits: int, inputs: int) -> LinearConfig:
    grains = -(-inputs // GRAIN)
    chunk = -(-grains // splits) * GRAIN
    return LinearConfig(-(-inputs // chunk), chunk, ())


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement. same: the bits are those of another tile."""

    rows: int
    splits: int
    chunk: int
    tile: Tile
    same: bool
    ms: float


def measure(args: argparse.Namespace) -> None:
    """Time candidates and write one JSON line each."""
    started = time.monotonic()
    candidates = compile_all([(tile, s) for s in (1, 2) for tile in (*small_tiles(tuple(SMALL)), *large_tiles(s))],
                             args.processes)
    print(f"{len(candidates)} candidates compiled in {time.monotonic() - started:.1f} s", flush=True)
    arrivals = torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device="cuda")
    with open(args.out, "w", encoding="utf-8") as file:
        for name, shapes in SHAPES.items():
            for outputs, inputs in shapes:
                problem = make_problem(outputs, inputs, 4096)
                file.write(json.dumps({"shape": [outputs, inputs], "library": library_invariance(problem)}) + "\n")
                lines = measure_shape(problem, candidates, arrivals)
                file.writelines(json.dumps({"shape": [outputs, inputs], **asdict(line)}) + "\n" for line in lines)
                best = {rows: min((round(line.ms, 5), line.splits) for line in lines if line.rows == rows)
                        for rows in sorted({line.rows for line in lines})}
                print(f"{time.monotonic() - started:6.1f} s  {name} {outputs}x{inputs}: {len(lines)} lines, "
                      f"{sum(not line.same for line in lines)} with other bits; best {best}", flush=True)
                file.flush()
                if time.monotonic() - started > args.seconds:
                    print("out of time")
                    return


# Rows, and the token tiles to try: first for every number of chunks, then for the two best of them.
FIRST = ((16, (16,)), (64, (64,)), (128, (128,)))
SECOND = ((32, (16, 32)), (64, (32,)), (128, (64,)), (192, (64, 128)), (256, (64, 128)), (512, (128,)), (4096, ()))


def measure_shape(problem: Problem, candidates: Sequence[tuple[Tile, int]], arrivals: Tensor) -> list[Line]:
    """Lines of one shape."""
    lines: list[Line] = []
    options = chunk_options(problem.outputs, problem.inputs)
    for splits in options:
        lines += measure_splits(problem, config_of(splits, problem.inputs), FIRST, candidates, arrivals)

    def cost(splits: int) -> float:
        return sum(min(line.ms for line in lines if (line.splits, line.rows) == (splits, rows)) for rows, _ in FIRST)

    for splits in sorted(options, key=cost)[:2]:
        lines += measure_splits(problem, config_of(splits, problem.inputs), SECOND, candidates, arrivals)
    return lines


def measure_splits(problem: Problem, config: LinearConfig, todo: Sequence[tuple[int, tuple[int, ...]]],
                   candidates: Sequence[tuple[Tile, int]], arrivals: Tensor) -> Iterator[Line]:
    """Lines of one shape in one division into chunks."""
    known = launch(problem.x[:512], problem.weights[0], None, arrivals, config, Tile(64, 64, 128, 4, 3))
    exact = problem.x[:32].double() @ problem.weights[0][:4096].double().T
    error = (known[:32, :4096].double() - exact).abs().max() / exact.abs().max()
    assert error < 0.01, f"{problem.outputs}x{problem.inputs} in {config.splits}: error {error}"
    for rows, tokens in todo:
        if rows == 4096 and (problem.inputs < 2048 or problem.outputs > 50_000):
            continue
        weights = problem.weights[:2] if rows == 4096 else problem.weights
        x = problem.x[:rows]
        for tile in (tile for tile, s in candidates if (s > 1) == (config.splits > 1)):
            if tile.tokens not in tokens if tile.spread else rows < 256:
                continue
            call = partial(launch, x, bias=None, arrivals=arrivals, config=config, tile=tile)
            same = bool(torch.equal(call(weights[0])[:512], known[:rows]))
            yield Line(rows, config.splits, config.chunk, tile, same, time_calls(call, weights, 3))


def table(_args: argparse.Namespace) -> None:
    """The configured operator against the library: ms, TB/s of weights, TFLOP/s; and its bits at every M."""
    linear = Linear(torch.device("cuda"))
    for name, shapes in SHAPES.items():
        for outputs, inputs in shapes:
            problem = make_problem(outputs, inputs, max(MANY_ROWS))
            full = linear(problem.x, problem.weights[0], None)
            for rows in (*ROWS, *MANY_ROWS):
                x = problem.x[:rows]
                assert torch.equal(linear(x, problem.weights[0], None), full[:rows]), f"bits differ at {rows} rows"
                weights = problem.weights[:2] if rows > 1024 else problem.weights
                ours = time_calls(lambda w, x=x: linear(x, w, None), weights)
                library = time_calls(lambda w, x=x: F.linear(x, w), weights)
                line = {"model": name, "shape": f"{outputs}x{inputs}", "rows": rows, "ms": round(ours, 5),
                        "library_ms": round(library, 5), "ratio": round(ours / library, 3),
                        "TBps": round(outputs * inputs * 2 / ours / 1e9, 2),
                        "TFLOPps": round(2 * rows * outputs * inputs / ours / 1e9, 1)}
                print(json.dumps(line), flush=True)


def between(_args: argparse.Namespace) -> None:
    """The operators between the GEMMs against their references, at Llama-3.1-8B's shape, in microseconds."""
    for rows in (1, 64, 128, 2048):
        for name, ours, reference in operator_pairs(rows):
            times = [round(1000 * time_calls(call, [torch.empty(0)] * 50), 2) for call in (ours, reference)]
            print(json.dumps({"operator": name, "rows": rows, "us": times[0], "reference_us": times[1]}), flush=True)


def operator_pairs(rows: int) -> Iterator[tuple[str, Callable[[Tensor], object], Callable[[Tensor], object]]]:
    """(name, kernel, reference); the argument of the calls is ignored."""
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, residual, weight, heads, gate_up = (normal(rows, 4096), normal(rows, 4096), normal(4096), normal(rows, 48, 128),
                                           normal(rows, 28672))
    query, key, angles = heads[:, :32], heads[:, 32:40], normal(rows, 64)
    yield ("add_rms_norm", lambda _: norm_triton.add_rms_norm(x, residual, weight, 1e-5, 0.0),
           lambda _: norm_reference.add_rms_norm(x, residual, weight, 1e-5, 0.0))
    yield ("rms_norm of heads", lambda _: norm_triton.rms_norm(query, weight[:128], 1e-5, 0.0),
           lambda _: norm_reference.rms_norm(query, weight[:128], 1e-5, 0.0))
    yield ("rotate", lambda _: rotate_triton.rotate(query, key, angles, angles),
           lambda _: rotate_reference.rotate(query, key, angles, angles))
    yield "gate", lambda _: gate_triton.gate(gate_up, "silu"), lambda _: gate_reference.gate(gate_up, "silu")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", required=True)
    measuring.add_argument("--processes", type=int, default=8)
    measuring.add_argument("--seconds", type=float, default=300.0)
    measuring.set_defaults(run=measure)
    commands.add_parser("table").set_defaults(run=table)
    commands.add_parser("between").set_defaults(run=between)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
