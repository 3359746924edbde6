"""Random mixed batches for the attention operators, and a plain loop that says what is right.

Everything a row may not read is NaN: keys past kv_len, unused blocks, unused logits of the probe.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection


@dataclass(frozen=True, slots=True)
class RowSpec:
    """num_queries tokens at the end of kv_len keys; sparse rows have one query."""

    kv_len: int
    num_queries: int = 1
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class CaseSpec:
    """What make_case builds. probes: scoring queries per full row, 0: no probe."""

    rows: tuple[RowSpec, ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    unit: int = 1
    sinks: int = 4
    capacity: int = 32
    window: int | None = None
    softcap: float | None = None
    probes: int = 0
    spare_tokens: int = 0  # padding tokens after the last row
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Arguments of paged_attention."""

    query: Tensor  # [T, H, D]
    key_cache: Tensor  # [num_blocks, block_size, KH, D]
    value_cache: Tensor
    rows: AttentionRows
    selection: RowSelection
    options: AttentionOptions
    probe: Probe | None


def make_case(spec: CaseSpec, seed: int) -> AttentionCase:
    """Random tensors for a spec; the caches are drawn on its device, so a seed means other keys there."""
    gen = torch.Generator().manual_seed(seed)
    num_rows = len(spec.rows)
    starts = [0]
    for row in spec.rows:
        starts.append(starts[-1] + row.num_queries)
    slots = torch.randperm(num_rows + 2, generator=gen)[:num_rows]
    key_cache, value_cache, table = _caches(spec, slots, gen)
    units, num_units, tail_start = _lists(spec, slots, gen)
    tokens = starts[-1] + spec.spare_tokens
    query = torch.randn(tokens, spec.num_heads, spec.head_dim, generator=gen)
    to = spec.device
    places = _places(spec, units, table, seed)
    places = None if places is None else places.to(to)
    rows = AttentionRows(
        query_start=torch.tensor(starts, dtype=torch.int32, device=to),
        kv_len=torch.tensor([row.kv_len for row in spec.rows], dtype=torch.int32, device=to),
        slot=slots.int().to(to),
        sparse=torch.tensor([row.sparse for row in spec.rows], dtype=torch.bool, device=to),
        block_table=table.to(to), tail_start=tail_start.to(to),
        max_query_len=max(row.num_queries for row in spec.rows), max_kv_len=max(row.kv_len for row in spec.rows) + 3)
    return AttentionCase(
        query.to(to, spec.dtype), key_cache.to(to, spec.dtype), value_cache.to(to, spec.dtype), rows,
        RowSelection(units.to(to), num_units.to(to), spec.unit, spec.sinks, places),
        AttentionOptions(spec.head_dim ** -0.5, spec.window, spec.softcap), _probe(spec, starts, rows, gen))


def _caches(spec: CaseSpec, slots: Tensor, gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    per_row = [-(-row.kv_len // spec.block_size) for row in spec.rows]
    num_blocks = sum(per_row) + 3
    order = torch.randperm(num_blocks, generator=gen)
    shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    caches = torch.full((2, *shape), torch.nan, device=spec.device)
    device_gen = torch.Generator(spec.device).manual_seed(int(order[0]))
    table = torch.zeros(len(spec.rows) + 2, max(per_row) + 1, dtype=torch.int32)
    used = 0
    for row, slot, count in zip(spec.rows, slots.tolist(), per_row, strict=True):
        blocks = order[used:used + count]
        used += count
        table[slot, :count] = blocks.int()
        fill = torch.randn(2, count * spec.block_size, *shape[2:], generator=device_gen, device=spec.device)
        fill[:, row.kv_len:] = torch.nan
        caches[:, blocks.to(spec.device)] = fill.view(2, count, *shape[1:])
    return caches[0], caches[1], table


def _lists(spec: CaseSpec, slots: Tensor, gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    units = torch.full((len(spec.rows) + 2, spec.capacity), -1, dtype=torch.int32)
    num_units = torch.zeros(len(spec.rows) + 2, dtype=torch.int32)
    tail_start = torch.zeros(len(spec.rows) + 2, dtype=torch.int32)
    first = -(-spec.sinks // spec.unit)
    for row, slot in zip(spec.rows, slots.tolist(), strict=True):
        whole = row.kv_len * 3 // 4 // spec.unit
        if whole <= first:
            continue  # short context: the tail is everything
        tail_start[slot] = whole * spec.unit
        count = int(torch.randint(0, min(spec.capacity, whole - first) + 1, (1,), generator=gen))
        chosen = torch.randperm(whole - first, generator=gen)[:count].sort().values + first
        units[slot, :count] = chosen.int()
        num_units[slot] = count
    return units, num_units, tail_start


def _places(spec: CaseSpec, units: Tensor, table: Tensor, seed: int) -> Tensor | None:
    """Where the listed units lie, for every other seed, if units lie inside blocks."""
    if seed % 2 or spec.block_size % spec.unit:
        return None
    per_block, unit = spec.block_size // spec.unit, units.clamp(min=0).long()
    return (table.long().gather(1, unit // per_block) * per_block + unit % per_block).int()


def _probe(spec: CaseSpec, starts: Sequence[int], rows: AttentionRows, gen: torch.Generator) -> Probe | None:
    full = [r for r, row in enumerate(spec.rows) if not row.sparse and row.kv_len > 0]
    if not spec.probes or not full:
        return None
    tokens = torch.full((len(full) + 1, spec.probes), -1, dtype=torch.int32)  # the last scoring row is padding
    for n, r in enumerate(full):
        count = min(spec.probes, spec.rows[r].num_queries)
        chosen = torch.randperm(spec.rows[r].num_queries, generator=gen)[:count].sort().values
        tokens[n, :count] = chosen.int() + starts[r]
    dtype = torch.bfloat16 if spec.dtype == torch.bfloat16 and spec.device != "cpu" else torch.float32
    logits = torch.full((len(full) + 1, spec.probes, spec.num_heads, rows.max_kv_len), torch.nan, dtype=dtype)
    row = torch.tensor([*full, -1], dtype=torch.int32)
    return Probe(tokens.to(spec.device), row.to(spec.device), logits.to(spec.device))


def plain_attention(case: AttentionCase, selection: RowSelection | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Token by token in float64: (out [T, H, D], lse [T, H], logits of token t over its keys, NaN where unread)."""
    rows, options = case.rows, case.options
    num_tokens, num_heads, dim = case.query.shape
    block_size, kv_heads = case.key_cache.shape[1:3]
    out = torch.zeros(num_tokens, num_heads, dim, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), torch.nan, dtype=torch.float64)
    logits = [torch.empty(0)] * num_tokens
    start, kv_len, slot = rows.query_start.tolist(), rows.kv_len.tolist(), rows.slot.tolist()
    keys, values = (c.double().cpu().flatten(0, 1) for c in (case.key_cache, case.value_cache))
    for r in range(len(kv_len)):
        table = rows.block_table[slot[r]].tolist()
        for token in range(start[r], start[r + 1]):
            position = kv_len[r] - start[r + 1] + token
            read = [p for p in range(position + 1) if options.window is None or p > position - options.window]
            if selection is not None and bool(rows.sparse[r]):
                allowed = allowed_positions(rows, selection, slot[r], kv_len[r])
                read = [p for p in read if p in allowed]
            physical = torch.tensor([table[p // block_size] * block_size + p % block_size for p in read])
            key = keys[physical].repeat_interleave(num_heads // kv_heads, 1) * options.key_scale  # [n, H, D]
            value = values[physical].repeat_interleave(num_heads // kv_heads, 1) * options.value_scale
            x = torch.einsum("hd,nhd->hn", case.query[token].double().cpu(), key) * options.scale
            if options.softcap is not None:
                x = options.softcap * torch.tanh(x / options.softcap)
            out[token] = torch.einsum("hn,nhd->hd", x.softmax(-1), value)
            lse[token] = x.logsumexp(-1)
            logits[token] = torch.full((num_heads, position + 1), torch.nan, dtype=torch.float64)
            logits[token][:, torch.tensor(read)] = x
    return out, lse, logits


def allowed_positions(rows: AttentionRows, selection: RowSelection, slot: int, kv_len: int) -> set[int]:
    """What a sparse row of this slot may read."""
    tail = int(rows.tail_start[slot])
    allowed = set(range(min(selection.sinks, tail, kv_len))) | set(range(tail, kv_len))
    for u in selection.units[slot, :int(selection.num_units[slot])].tolist():
        allowed |= set(range(u * selection.unit, (u + 1) * selection.unit))
    return allowed


def random_spec(rng: random.Random, *, max_kv_len: int, device: str = "cpu",
                dtype: torch.dtype = torch.float32) -> CaseSpec:
    """A mixed batch as the engine makes them: verifying, drafting, prefilling and padding rows, odd sizes."""
    rows = []
    for _ in range(rng.randint(1, 9)):
        kind = rng.choice(("verify", "sparse", "sparse", "decode", "prefill", "padding"))
        n = rng.randint(1, max_kv_len)
        queries = {"verify": min(n, rng.randint(2, 17)), "prefill": min(n, rng.randint(18, 90))}.get(kind, 1)
        rows.append(RowSpec(0, 0) if kind == "padding" else RowSpec(n, queries, kind == "sparse"))
    if all(row.kv_len == 0 for row in rows):
        rows.append(RowSpec(max_kv_len))
    groups, unit = rng.choice((1, 2, 3, 4, 6, 8)), rng.choice((1, 2, 4, 8, 16))
    kv_heads = rng.choice((1, 2, 3))
    return CaseSpec(
        tuple(rows), num_heads=groups * kv_heads, num_kv_heads=kv_heads, head_dim=rng.choice((64, 64, 96, 128, 256)),
        block_size=rng.choice((8, 16, 32)), unit=unit, sinks=unit * rng.randint(0, 4 if unit > 1 else 9),
        capacity=rng.choice((1, 8, 40)), window=rng.choice((None, None, None, 1, 33, 100)),
        softcap=rng.choice((None, None, 5.0)), probes=rng.choice((0, 1, 2, 4)), spare_tokens=rng.choice((0, 0, 3)),
        dtype=dtype, device=device)
