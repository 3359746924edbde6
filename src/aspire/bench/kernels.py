"""Attention operators on this GPU against the bytes they must move, at the copy bandwidth measured in the same run.

`python -m aspire.bench.kernels` checks the kernels against the reference first and refuses to time wrong ones. Prints a
table, then one JSON line per row. Times are medians of graph replays, per layer, over caches larger than the L2.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from aspire.bench.kernel_mixes import BLOCK, LLAMA, Mix, Shape, build, needed_bytes, standard_mixes

if TYPE_CHECKING:
    from aspire.ops.paged_attention.triton import KernelConfig


@dataclass(frozen=True, slots=True)
class Timing:
    """One row of the table. floor_ms: bytes over the copy bandwidth. fraction: floor over time."""

    operator: str
    mix: str
    shape: str
    ms: float
    gigabytes: float
    floor_ms: float
    fraction: float


def replay_ms(layer: Callable[[int], object], layers: int, repeats: int = 12) -> float:
    """Median milliseconds of one layer in a captured graph that runs `layers` of them twice."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(2 * layers):
            layer(index % layers)
    times = []
    for index in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= 3:
            times.append(begin.elapsed_time(end) / (2 * layers))
    return float(statistics.median(times))


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, read plus written (launched plainly: a graph's copy node is slower)."""
    import torch

    source, target = torch.randn(2, 1 << 29, device="cuda")
    times = []
    for index in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(begin.elapsed_time(end))
    return float(2 * source.numel() * 4 / statistics.median(times) * 1e3)


def time_attention(mix: Mix, bandwidth: float, config: "KernelConfig | None" = None) -> Timing:
    """One layer of paged attention, the step's plan shared by the layers of a replay."""
    from aspire.ops.paged_attention.triton import PagedAttention

    inputs, attention = build(mix), PagedAttention(config)

    def layer(index: int) -> object:
        return attention(inputs.query, inputs.key_caches[index], inputs.value_caches[index], inputs.rows,
                         inputs.selection, inputs.options, inputs.probe)

    ms = replay_ms(layer, len(inputs.key_caches))
    return _timing("paged_attention", mix, ms, needed_bytes(mix), bandwidth)


def time_torch_attention(mix: Mix, bandwidth: float) -> Timing:
    """torch's own attention over the same keys, contiguous and already gathered (a help it would not have)."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    shape = mix.shape
    size = (mix.full, shape.num_kv_heads, mix.context, shape.head_dim)
    key, value = torch.randn(2, *size, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(mix.full, shape.num_heads, mix.queries, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    ms = replay_ms(lambda _: scaled_dot_product_attention(query, key, value, enable_gqa=True), 2)
    return _timing("torch sdpa", mix, ms, needed_bytes(mix), bandwidth)


def time_scoring(mix: Mix, bandwidth: float) -> list[Timing]:
    """key_scores and select_topk after a probed layer."""
    import torch

    from aspire.ops.key_scores.triton import key_scores
    from aspire.ops.select_topk.triton import select_topk

    inputs, shape = build(mix), mix.shape
    probe = inputs.probe
    assert probe is not None
    probe.logits.normal_()
    lse = torch.full(inputs.query.shape[:2], 12.0, device="cuda")
    scores = key_scores(probe, lse, inputs.rows, unit=mix.unit, reduce="mean")
    used, capacity = (probe.token >= 0).sum(1), (mix.selected or 512) // mix.unit
    first = torch.zeros(len(used), dtype=torch.int32, device="cuda")
    last = torch.where(used > 0, scores.shape[1] - 4, first)
    k = torch.full_like(first, capacity)
    ms = [replay_ms(lambda _: key_scores(probe, lse, inputs.rows, unit=mix.unit, reduce="mean"), 4),
          replay_ms(lambda _: select_topk(scores, first, last, k, capacity=capacity, coverage=None), 4)]
    score_bytes = int((used > 0).sum()) * mix.context // mix.unit * 4
    logits = int(used.sum()) * mix.context * shape.num_heads * 2
    return [_timing("key_scores", mix, ms[0], logits + score_bytes, bandwidth),
            _timing("select_topk", mix, ms[1], score_bytes, bandwidth)]


def time_select(rows: int, units: int, bandwidth: float) -> Timing:
    """select_topk of 444 units, as many as a budget of 512 tokens leaves, of log-normal scores."""
    import torch

    from aspire.ops.select_topk.reference import select_topk as reference
    from aspire.ops.select_topk.triton import select_topk

    scores = torch.randn(rows, units, device="cuda").mul(2).exp()
    first = torch.full((rows,), 4, dtype=torch.int32, device="cuda")
    last, k = torch.full_like(first, units - 64), torch.full_like(first, 444)
    expected = reference(scores, first, last, k, capacity=444, coverage=None)
    found = select_topk(scores, first, last, k, capacity=444, coverage=None)
    assert torch.equal(found[0], expected[0]), f"select_topk differs from the reference at {rows} x {units}"
    ms = replay_ms(lambda _: select_topk(scores, first, last, k, capacity=444, coverage=None), 8)
    return _timing("select_topk", Mix(f"444 of {units}, {rows} rows", LLAMA, rows, 1, units), ms, scores.nbytes,
                   bandwidth)


def time_store(tokens: int, shape: Shape, bandwidth: float) -> Timing:
    """store_kv of one layer."""
    import torch

    from aspire.ops.store_kv.triton import store_kv

    key, value = torch.randn(2, tokens, shape.num_kv_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    caches = torch.empty(2, 4096, BLOCK, shape.num_kv_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(4096 * BLOCK, device="cuda")[:tokens]
    ms = replay_ms(lambda _: store_kv(key, value, caches[0], caches[1], slots), 8)
    moved = 4 * key.numel() * key.element_size()
    return _timing("store_kv", Mix(f"{tokens} tokens", shape, tokens, 1, 0), ms, moved, bandwidth)


def _timing(operator: str, mix: Mix, ms: float, moved: int, bandwidth: float) -> Timing:
    floor = moved / bandwidth * 1e3
    return Timing(operator, mix.name, mix.shape.name, ms, moved / 1e9, floor, floor / ms)


def check(seeds: Sequence[int] = range(6)) -> None:
    """Kernels against the reference on random mixed batches; raises AssertionError where they differ."""
    from aspire.testing.attention_checks import check_seed

    for seed in seeds:
        check_seed(seed, device="cuda")


def run(mixes: Sequence[Mix] | None = None) -> list[Timing]:
    """Check, then time everything. Raises RuntimeError without a CUDA device, AssertionError when a check fails."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("aspire bench kernels needs a CUDA device")
    check()
    bandwidth = copy_bandwidth()
    found = [Timing("copy", "4 GB read and written", "", 4.295e12 / bandwidth, 4.295, 4.295e12 / bandwidth, 1.0)]
    for mix in standard_mixes() if mixes is None else mixes:
        found.append(time_attention(mix, bandwidth))
        if mix.sparse == 0 and mix.queries == 1:
            found.append(time_torch_attention(mix, bandwidth))
        if mix.probes and (mix.full or not mix.selected):
            found += time_scoring(mix, bandwidth)
        torch.cuda.empty_cache()
    found += [time_select(rows, units, bandwidth) for units in (8000, 33000, 131000) for rows in (16, 128)]
    found += [time_store(tokens, LLAMA, bandwidth) for tokens in (64, 2048)]
    return found


def table(timings: Sequence[Timing]) -> str:
    """Fixed-width text, one line per timing."""
    lines = [f"{'operator':16} {'shape':5} {'mix':38} {'ms':>9} {'GB':>8} {'TB/s':>6} {'of copy':>8}"]
    lines += [f"{t.operator:16} {t.shape:5} {t.mix:38} {t.ms:9.4f} {t.gigabytes:8.4f} {t.gigabytes / t.ms:6.2f} "
              f"{t.fraction:8.1%}" for t in timings]
    return "\n".join(lines)


def main() -> None:
    timings = run()
    print(table(timings))
    for timing in timings:
        print(json.dumps(asdict(timing)))


if __name__ == "__main__":
    main()
