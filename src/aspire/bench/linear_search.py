"""Finds chunks and tiles of the batch-invariant linear on this GPU by measurement and writes ops/linear/tuned.py.

`python -m aspire.bench.linear_search --lines FILE --out src/aspire/ops/linear/tuned.py`. A candidate that is wrong or
whose bits differ from another tile's ends the search.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from aspire.bench.linear import SHAPES, Problem, make_problem, time_calls
from aspire.ops.linear.triton import MAX_SPLIT_TILES, launch
from aspire.ops.linear.values import GRAIN, LinearConfig, Tile

# (weights, depth, warps, stages) by tokens and extra tokens
PROGRAMS = {
    (16, 0): ((64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 6), (128, 128, 4, 4)),
    (32, 0): ((64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 6), (128, 128, 4, 4)),
    (32, 16): ((64, 64, 4, 7), (64, 128, 4, 4), (128, 64, 4, 6), (128, 128, 4, 3)),
    (64, 0): ((64, 64, 4, 6), (64, 128, 4, 4), (128, 64, 4, 5), (128, 128, 4, 3)),
    (64, 32): ((64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 5)),
    (128, 0): ((64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 64, 8, 3)),
    (128, 64): ((64, 64, 4, 4), (128, 64, 8, 4), (128, 64, 8, 5), (256, 64, 8, 3)),
    (256, 0): ((64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4)),
}
# Rows, and the (tokens, extra) to try there.
FIRST = ((16, ((16, 0),)), (64, ((32, 0), (64, 0))), (128, ((64, 0), (128, 0))))
SECOND = ((32, ((16, 0), (32, 0))), (48, ((16, 0), (32, 16), (64, 0))), (96, ((32, 0), (64, 32), (128, 0))),
          (192, ((64, 0), (64, 32), (128, 64), (256, 0))), (256, ((64, 0), (128, 0), (256, 0))),
          (384, ((128, 0), (128, 64))), (512, ((128, 0), (256, 0))), (4096, ((128, 0), (256, 0))))
Todo = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement."""

    rows: int
    splits: int
    chunk: int
    tile: Tile
    ms: float


def candidates(splits: int) -> Iterator[Tile]:
    """Tiles for one chunk or several; a program that adds several itself has no room for a second sum of 256."""
    for (tokens, extra), programs in PROGRAMS.items():
        for weights, depth, warps, stages in programs:
            if tokens + extra <= 64:
                yield Tile(weights, tokens, depth, warps, stages, True, "pointers", extra)
            if splits == 1 or tokens + extra < 256:
                yield Tile(weights, tokens, depth, warps, stages, True, "descriptors", extra)
            if splits > 1 and 128 <= tokens + extra < 256 and weights == 128 and warps == 8:
                yield Tile(weights, tokens, depth, warps, stages, False, "descriptors", extra)


def compile_tile(task: tuple[Tile, int]) -> str | None:
    """Compile one candidate, for whole and for broken tiles, into the disk cache; the reason if it cannot run."""
    tile, splits = task
    arrivals = torch.zeros(1024, dtype=torch.int32, device="cuda")
    try:
        for inputs in (2 * GRAIN * splits, 2 * GRAIN * splits - 32):
            x, weight = (torch.ones(rows, inputs, dtype=torch.bfloat16, device="cuda") for rows in (48, 512))
            launch(x, weight, None, arrivals, LinearConfig(splits, 2 * GRAIN, ()), tile)
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


def divide(splits: int, inputs: int) -> LinearConfig:
    """`inputs` in about `splits` chunks of whole grains."""
    grains = -(-inputs // GRAIN)
    chunk = -(-grains // splits) * GRAIN
    return LinearConfig(-(-inputs // chunk), chunk, ())


def measure_shape(problem: Problem, tasks: Sequence[tuple[Tile, int]], arrivals: Tensor) -> list[Line]:
    """Lines of one shape: some rows for every number of chunks, the others for the fastest of them."""
    few = problem.outputs <= 64 * 64 and problem.inputs >= 2048  # too few programs to fill the card
    options = [divide(splits, problem.inputs) for splits in ((1, 2, 3) if few else (1,))]
    lines = {config: list(measure(problem, config, FIRST, tasks, arrivals)) for config in options}

    def cost(config: LinearConfig) -> float:
        return sum(min(line.ms for line in lines[config] if line.rows == rows) for rows, _ in FIRST)

    best = min(options, key=cost)
    print("   ", {config.splits: round(cost(config), 4) for config in options})
    return [*(line for config in options for line in lines[config]),
            *measure(problem, best, SECOND, tasks, arrivals)]


def measure(problem: Problem, config: LinearConfig, todo: Todo, tasks: Sequence[tuple[Tile, int]],
            arrivals: Tensor) -> Iterator[Line]:
    """Lines of one shape in one division into chunks."""
    shape = f"{problem.outputs}x{problem.inputs} in {config.splits}"
    known = launch(problem.x[:512], problem.weights[0], None, arrivals, config, Tile(64, 64, 128, 4, 3))
    exact = problem.x[:32].double() @ problem.weights[0][:4096].double().T
    error = (known[:32, :4096].double() - exact).abs().max() / exact.abs().max()
    assert error < 0.01, f"{shape}: error {error}"
    for rows, widths in todo:
        if rows == 4096 and problem.outputs > 40_000:
            continue
        weights = problem.weights[:2] if rows == 4096 else problem.weights
        for tile, splits in tasks:
            if (splits > 1) != (config.splits > 1) or (tile.tokens, tile.extra) not in widths:
                continue
            if config.splits > 1 and tile.spread == (rows > 256):
                continue
            call = partial(launch, problem.x[:rows], bias=None, arrivals=arrivals, config=config, tile=tile)
            assert torch.equal(call(weights[0])[:512], known[:rows]), f"{shape}: other bits by {tile} at {rows} rows"
            yield Line(rows, config.splits, config.chunk, tile, time_calls(call, weights, 3))


def choose(lines: Sequence[Line]) -> LinearConfig:
    """The fastest tile for each number of rows, or that for more rows where it is faster still; of the division that
    has all numbers."""
    most = max(lines, key=lambda line: line.rows)
    tiles: list[tuple[int, Tile]] = []
    least = float("inf")
    for rows in sorted({line.rows for line in lines}, reverse=True):
        fastest = min((line for line in lines if line.rows == rows and line.splits == most.splits),
                      key=lambda line: line.ms)
        if fastest.ms < least:
            least = fastest.ms
            tiles.insert(0, (1 << 30 if rows == most.rows else rows, fastest.tile))
    return LinearConfig(most.splits, most.chunk, tuple(tiles))


def tuned_file(configs: dict[tuple[int, int], LinearConfig]) -> str:
    """The text of ops/linear/tuned.py."""
    text = [f'"""Measured configurations by (N, K), for {torch.cuda.get_device_name()}.', "",
            "Written by `python -m aspire.bench.linear_search`; the lines are data.", '"""', "",
            "from aspire.ops.linear.values import LinearConfig, Tile", "", "TUNED = {"]
    for shape, config in configs.items():
        text.append(f"    {shape}: LinearConfig({config.splits}, {config.chunk}, (")
        for rows, t in config.tiles:
            limit = "1 << 30" if rows == 1 << 30 else str(rows)
            numbers = f"{t.weights}, {t.tokens}, {t.depth}, {t.warps}, {t.stages}"
            text.append(f'        ({limit}, Tile({numbers}, {t.spread}, "{t.loads}", {t.extra})),')
        text.append("    )),")
    return "\n".join([*text, "}", ""])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--processes", type=int, default=8)
    args = parser.parse_args(argv)
    started = time.monotonic()
    tasks = compile_all([(tile, s) for s in (1, 2) for tile in candidates(s)], args.processes)
    print(f"{len(tasks)} candidates compiled in {time.monotonic() - started:.1f} s", flush=True)
    arrivals = torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device="cuda")
    configs = {}
    with open(args.lines, "w", encoding="utf-8") as file:
        for shape in (shape for shapes in SHAPES.values() for shape in shapes):
            lines = measure_shape(make_problem(*shape, rows=4096), tasks, arrivals)
            file.writelines(json.dumps({"shape": shape, **asdict(line)}) + "\n" for line in lines)
            file.flush()
            configs[shape] = choose(lines)
            with open(args.out, "w", encoding="utf-8") as tuned:
                tuned.write(tuned_file(configs))
            print(f"{time.monotonic() - started:6.1f} s  {shape}: {len(lines)} measured", flush=True)


if __name__ == "__main__":
    main()
