"""Batches for the kernel benchmarks: what a step's attention is asked for, and the bytes that it cannot avoid."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's attention layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Mix:
    """A batch: `full` rows of `queries` tokens over `context` keys, `sparse` rows of `selected` keys of a context.

    selected: 0: sparse rows read everything, as in a layer that renews their lists. probes: queries of each full row,
    or of each sparse row where selected is 0. longest: a captured graph's bound of `queries`, which also pads the
    probes to all rows; 0: no graph.
    """

    name: str
    shape: Shape
    full: int
    queries: int
    context: int
    sparse: int = 0
    selected: int = 512
    unit: int = 1
    probes: int = 0
    longest: int = 0


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
MOST_LAYERS = 8  # of caches, in a replay
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
    return (*full, *sparse, *mixed, *probe, *small, *step_mixes())


def step_mixes() -> tuple[Mix, ...]:
    """Layers of the captured steps of 16 requests at 32k, of which none to 4 verify 11 tokens: plain layers, those
    whose verifications are probed, and one that renews the lists."""
    layers = [Mix(f"{full} verify 11 at 32k, {16 - full} sparse, {probes} probed", LLAMA, full, 11, 32768,
                  sparse=16 - full, probes=probes, longest=17) for probes in (0, 4) for full in (0, 1, 2, 4)]
    return (*layers, Mix("16 drafting rows read 32k, 1 probed", LLAMA, 0, 1, 32768, sparse=16, selected=0, probes=1,
                         longest=17))


def build(mix: Mix, device: str = "cuda") -> Inputs:
    """Random tensors for a mix, bfloat16."""
    import torch

    from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection

    shape, gen = mix.shape, torch.Generator(device).manual_seed(0)
    num_rows = mix.full + mix.sparse
    per_row = mix.context // BLOCK
    token_bytes = 4 * shape.num_kv_heads * shape.head_dim
    used = (mix.full * mix.context + mix.sparse * (mix.selected or mix.context)) * token_bytes
    layers = max(2, min(MOST_LAYERS, -(-L2_BYTES * 2 // used)))
    size = (num_rows * per_row, BLOCK, shape.num_kv_heads, shape.head_dim)

    def cache() -> "torch.Tensor":
        return torch.randn(size, generator=gen, device=device, dtype=torch.bfloat16)

    lengths = [mix.queries] * mix.full + [1] * mix.sparse
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    window, capacity = 64, max(mix.unit, mix.selected - 64)
    candidates = (mix.context - window) // mix.unit
    units = torch.stack([torch.randperm(candidates, generator=gen, device=device)[:capacity // mix.unit].sort().values
                         for _ in range(num_rows)]).int()
    start = torch.tensor([0, *lengths], **ints).cumsum(0).int()
    rows = AttentionRows(
        query_start=start, kv_len=torch.full((num_rows,), mix.context, **ints), slot=torch.arange(num_rows, **ints),
        sparse=torch.arange(num_rows, device=device) >= mix.full,
        block_table=torch.randperm(size[0], generator=gen, device=device).int().view(num_rows, -1),
        tail_start=torch.full((num_rows,), mix.context - window, **ints), max_query_len=max(*lengths, mix.longest),
        max_kv_len=mix.context)
    selection = None
    if mix.sparse and mix.selected:
        selection = RowSelection(units, torch.full((num_rows,), units.shape[1], **ints), mix.unit, sinks=0)
    probe = None
    if mix.probes:
        probed = slice(0, mix.full) if selection or not mix.sparse else slice(mix.full, None)
        offsets = torch.linspace(0, mix.queries - 1, mix.probes, device=device).long()
        token = torch.full((num_rows, mix.probes), -1, **ints)
        token[probed] = (start[:-1][probed, None] + offsets).int()
        kept = slice(0, None) if mix.longest else probed
        probe = Probe(token[kept], torch.arange(num_rows, **ints)[kept], torch.empty(
            len(token[kept]), mix.probes, shape.num_heads, mix.context, dtype=torch.bfloat16, device=device))
    query = torch.randn(sum(lengths), shape.num_heads, shape.head_dim, generator=gen, device=device,
                        dtype=torch.bfloat16)
    return Inputs(query, tuple(cache() for _ in range(layers)), tuple(cache() for _ in range(layers)), rows, selection,
                  AttentionOptions(shape.head_dim ** -0.5), probe)


def needed_bytes(mix: Mix) -> int:
    """Keys and values once, queries and outputs once, probed logits once; bfloat16."""
    shape = mix.shape
    keys = mix.full * mix.context + mix.sparse * (mix.selected or mix.context)
    tokens = mix.full * mix.queries + mix.sparse
    probed = (mix.full if mix.selected else mix.sparse) * mix.probes * mix.context * shape.num_heads * 2
    return keys * shape.num_kv_heads * shape.head_dim * 4 + tokens * shape.num_heads * shape.head_dim * 4 + probed
