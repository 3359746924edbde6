"""Attention operators on this GPU against the bytes they must move, at the copy bandwidth measured in the same run.

`python -m aspire.bench.kernels` checks the kernels against the reference first and refuses to time wrong ones. Prints a
table, then one JSON line per row. Times are medians of graph replays, per layer, over caches larger than the L2.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection
    from aspire.ops.paged_attention.triton import KernelConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's attention layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Mix:
    """A batch: `full` rows of `queries` tokens over `context` keys, `sparse` rows of `selected` keys of a context."""

    name: str
    shape: Shape
    full: int
    queries: int
    context: int
    sparse: int = 0
    selected: int = 512
    unit: int = 1
    probes: int = 0


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


@dataclass(frozen=True, slots=True)
class Inputs:
    """A mix on the device, with several layers' caches so that no replay finds its keys in the L2."""

    query: "torch.Tensor"  # [T, H, D]
    key_caches: "tuple[torch.Tensor, ...]"
    value_caches: "tuple[torch.Tensor, ...]"
    rows: "AttentionRows"
    selection: "RowSelection | None"
    options: "AttentionOptions"
    probe: "Probe | None"


LLAMA = Shape("8B", 32, 8, 128)
SMOL = Shape("135M", 9, 3, 64)
L2_BYTES = 128 << 20
BLOCK = 16


def standard_mixes() -> tuple[Mix, ...]:
    """All verify, all sparse, 1 in 8; contexts 2k to 128k; batch 1 to 128."""
    full = [Mix(f"{b} x {n // 1024}k, {q} query", LLAMA, b, q, n)
            for b, n, q in ((16, 32768, 1), (16, 32768, 8), (16, 32768, 16), (64, 8192, 1), (1, 2048, 1), (1, 32768, 1),
                            (1, 131072, 1), (128, 2048, 1), (4, 131072, 8))]
    sparse = [Mix(f"64 sparse of 512, unit {unit}", LLAMA, 0, 1, 32768, sparse=64, unit=unit) for unit in (1, 16)]
    mixed = [Mix(f"8 verify 8 at 32k, 56 sparse, unit {unit}", LLAMA, 8, 8, 32768, sparse=56, unit=unit)
             for unit in (1, 16)]
    probe = [Mix("16 x 32k, 8 query, 2 probed", LLAMA, 16, 8, 32768, probes=2)]
    small = [Mix("128 x 8k, 1 query", SMOL, 128, 1, 8192), Mix("16 x 8k, 1 query", SMOL, 16, 1, 8192),
             Mix("16 verify 16 at 8k, 112 sparse", SMOL, 16, 16, 8192, sparse=112)]
    return (*full, *sparse, *mixed, *probe, *small)


def build(mix: Mix, device: str = "cuda") -> Inputs:
    """Random tensors for a mix, bfloat16."""
    import torch

    from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection

    shape, gen = mix.shape, torch.Generator(device).manual_seed(0)
    num_rows = mix.full + mix.sparse
    per_row = mix.context // BLOCK
    token_bytes = 4 * shape.num_kv_heads * shape.head_dim
    used = (mix.full * mix.context + mix.sparse * mix.selected) * token_bytes
    layers = max(2, min(8, -(-L2_BYTES * 2 // used)))
    size = (num_rows * per_row, BLOCK, shape.num_kv_heads, shape.head_dim)

    def cache() -> "torch.Tensor":
        return torch.randn(size, generator=gen, device=device, dtype=torch.bfloat16)

    lengths = [mix.queries] * mix.full + [1] * mix.sparse
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    window, capacity = 64, mix.selected - 64
    candidates = (mix.context - window) // mix.unit
    units = torch.stack([torch.randperm(candidates, generator=gen, device=device)[:capacity // mix.unit].sort().values
                         for _ in range(num_rows)]).int()
    start = torch.tensor([0, *lengths], **ints).cumsum(0).int()
    rows = AttentionRows(
        query_start=start, kv_len=torch.full((num_rows,), mix.context, **ints), slot=torch.arange(num_rows, **ints),
        sparse=torch.arange(num_rows, device=device) >= mix.full,
        block_table=torch.randperm(size[0], generator=gen, device=device).int().view(num_rows, -1),
        tail_start=torch.full((num_rows,), mix.context - window, **ints), max_query_len=max(lengths),
        max_kv_len=mix.context)
    selection = None
    if mix.sparse:
        selection = RowSelection(units, torch.full((num_rows,), units.shape[1], **ints), mix.unit, sinks=0)
    probe = None
    if mix.probes:
        offsets = torch.linspace(0, mix.queries - 1, mix.probes, device=device).long()
        token = start[:mix.full, None] + offsets
        logits = torch.empty(mix.full, mix.probes, shape.num_heads, mix.context, dtype=torch.bfloat16, device=device)
        probe = Probe(token.int(), torch.arange(mix.full, **ints), logits)
    query = torch.randn(sum(lengths), shape.num_heads, shape.head_dim, generator=gen, device=device,
                        dtype=torch.bfloat16)
    return Inputs(query, tuple(cache() for _ in range(layers)), tuple(cache() for _ in range(layers)), rows, selection,
                  AttentionOptions(shape.head_dim ** -0.5), probe)


def needed_bytes(mix: Mix) -> int:
    """Keys and values once, queries and outputs once, probed logits once; bfloat16."""
    shape = mix.shape
    keys = mix.full * mix.context + mix.sparse * mix.selected
    tokens = mix.full * mix.queries + mix.sparse
    probed = mix.full * mix.probes * mix.context * shape.num_heads * 2
    return keys * shape.num_kv_heads * shape.head_dim * 4 + tokens * shape.num_heads * shape.head_dim * 4 + probed


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
    first = torch.zeros(mix.full, dtype=torch.int32, device="cuda")
    last, k = torch.full_like(first, scores.shape[1] - 4), torch.full_like(first, mix.selected // mix.unit)
    ms = [replay_ms(lambda _: key_scores(probe, lse, inputs.rows, unit=mix.unit, reduce="mean"), 4),
          replay_ms(lambda _: select_topk(scores, first, last, k, capacity=mix.selected, coverage=None), 4)]
    score_bytes = mix.full * mix.context // mix.unit * 4
    logits = mix.full * mix.probes * mix.context * shape.num_heads * 2
    return [_timing("key_scores", mix, ms[0], logits + score_bytes, bandwidth),
            _timing("select_topk", mix, ms[1], score_bytes, bandwidth)]


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
        if mix.probes:
            found += time_scoring(mix, bandwidth)
        torch.cuda.empty_cache()
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
