"""Attention of one long prompt chunk on this GPU: the kernel for mixed rows against the libraries, in TFLOP/s.

`python -m aspire.bench.chunks` tells from how many queries a chunk belongs to a library, and to which. Backends are
compared with each other first; a table, then one JSON line per timing. Times are medians of eager calls, per layer, and
hold everything a layer does for the chunk, the gathering of keys included. A backend that fails is named and left out.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from aspire.bench.kernel_mixes import LLAMA, Inputs, Mix, build

if TYPE_CHECKING:
    from aspire.attention.protocol import AttentionBackend

CHUNKS = (64, 128, 256, 512, 2048, 8192)
CONTEXTS = (0, 8192, 30720)


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    """context: keys before the chunk. of_matrix: rate over that of a large matrix product in the same run."""

    backend: str
    queries: int
    context: int
    ms: float
    tflops: float
    of_matrix: float


def median_ms(work: Callable[[], object], repeats: int = 10) -> float:
    """Median milliseconds of an eager call, after two that warm up."""
    import torch

    times = []
    for index in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def matrix_rate(size: int = 8192) -> float:
    """FLOP/s of a square bfloat16 product."""
    import torch

    left, right = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 / median_ms(lambda: left @ right) * 1e3


def backends() -> "dict[str, AttentionBackend]":
    """By name; the libraries take every chunk here."""
    from aspire.attention.chunked import ChunkedAttention
    from aspire.attention.libraries import CudnnChunks, FlashChunks
    from aspire.attention.triton import TritonAttention
    from aspire.ops.merge_attention.triton import merge_attention

    return {"triton": TritonAttention(), "flash": ChunkedAttention(TritonAttention, FlashChunks(), least=1),
            "cudnn": ChunkedAttention(TritonAttention, CudnnChunks(merge_attention), least=1)}


def chunk_inputs(queries: int, context: int) -> Inputs:
    """One chunk at the end of its keys, of an 8B model."""
    from aspire.attention.rows import HostRow

    length = -(-(queries + context) // 16) * 16
    inputs = build(Mix("chunk", LLAMA, 1, queries, length))
    host = (HostRow(0, queries, length, 0),)
    return replace(inputs, rows=replace(inputs.rows, host=host))


def time_chunk(name: str, backend: "AttentionBackend", inputs: Inputs, rate: float) -> ChunkTiming:
    """All layers of the inputs in turn, so that no keys are left in the cache; the step is planned once."""
    rows = replace(inputs.rows)
    queries, context = len(inputs.query), inputs.rows.max_kv_len - len(inputs.query)

    def layers() -> None:
        for key, value in zip(inputs.key_caches, inputs.value_caches, strict=True):
            backend.attend(inputs.query, key, value, rows, None, inputs.options, None)

    ms = median_ms(layers) / len(inputs.key_caches)
    flops = 4 * LLAMA.num_heads * LLAMA.head_dim * (queries * context + queries * (queries + 1) // 2)
    return ChunkTiming(name, queries, context, ms, flops / ms / 1e9, flops / ms * 1e3 / rate)


def run() -> list[ChunkTiming]:
    """RuntimeError without a CUDA device, AssertionError where the backends differ."""
    import torch

    from aspire.testing.attention_checks import TOLERANCE, relative_error

    if not torch.cuda.is_available():
        raise RuntimeError("this needs a CUDA device")
    rate, found = matrix_rate(), []
    for context in CONTEXTS:
        for queries in CHUNKS:
            inputs, outs = chunk_inputs(queries, context), {}
            for name, backend in backends().items():
                try:
                    outs[name] = backend.attend(inputs.query, inputs.key_caches[0], inputs.value_caches[0],
                                                inputs.rows, None, inputs.options, None)[0]
                except RuntimeError as error:
                    print(f"{name} at {queries} + {context} failed: {error}")
                    continue
                difference = relative_error(outs[name], outs["triton"])
                assert difference < 2 * TOLERANCE[torch.bfloat16], f"{name}: {difference} at {queries} + {context}"
                found.append(time_chunk(name, backend, inputs, rate))
            torch.cuda.empty_cache()
    return found


def table(timings: list[ChunkTiming]) -> str:
    """Fixed-width text, one line per timing."""
    lines = [f"{'backend':8} {'queries':>8} {'context':>8} {'ms':>9} {'TFLOP/s':>8} {'of matrix':>9}"]
    lines += [f"{t.backend:8} {t.queries:8} {t.context:8} {t.ms:9.4f} {t.tflops:8.1f} {t.of_matrix:9.1%}"
              for t in timings]
    return "\n".join(lines)


def main() -> None:
    timings = run()
    print(table(timings))
    for timing in timings:
        print(json.dumps(asdict(timing)))


if __name__ == "__main__":
    main()
