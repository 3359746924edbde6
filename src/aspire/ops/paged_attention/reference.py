"""paged_attention: attention of mixed ragged rows over the paged cache (torch, any device, float32 inside).

Also the CPU backend: long query runs go through torch's fused attention, sparse rows are gathered and batched.
Letters: T tokens, H query heads, KH key heads, G = H / KH, D head dim, q query tokens of a row, n keys of a row.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection

FOLD_LIMIT = 128  # query tokens up to which the heads of a group are stacked as extra queries of one head
TILE = 512  # query tokens per masked pass of a long run


@dataclass(frozen=True, slots=True)
class _Row:
    """Host view of a row with tokens: query tokens [begin, end), keys [0, kv_len)."""

    index: int
    begin: int
    end: int
    kv_len: int
    slot: int
    sparse: bool


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: "AttentionRows",
                    selection: "RowSelection | None", options: "AttentionOptions",
                    probe: "Probe | None") -> tuple[Tensor, Tensor | None]:
    """Attend every row's query tokens to its keys.

    query: [T, H, D]. key_cache, value_cache: [num_blocks, block_size, KH, D]. selection None: every row reads all its
    keys; otherwise sparse rows read their sinks, listed units and tail. Returns (out [T, H, D], zero for tokens of no
    row; lse float32 [T, H], natural log, defined for probed tokens, None without a probe). Probed logits are written
    to probe.logits for the keys that the query sees (with a window: only those inside it).
    """
    out = torch.zeros_like(query)
    lse = None if probe is None else query.new_full(query.shape[:2], torch.nan, dtype=torch.float32)
    probed = {} if probe is None else _probed_queries(probe)
    restricted = []
    for row in _host_rows(rows):
        if selection is not None and row.sparse:
            assert row.index not in probed, f"row {row.index} is sparse here and must not be probed"
            restricted.append(row)
            continue
        key, value = _gather(key_cache, value_cache, rows.block_table[row.slot], row.kv_len, options)
        out[row.begin:row.end] = _attend_row(query[row.begin:row.end].float(), key, value, options).to(query.dtype)
        if probe is not None and lse is not None:
            _write_probe(query, key, row, options, probe, probed.get(row.index, ()), lse)
    if restricted and selection is not None:
        _attend_restricted(query, key_cache, value_cache, rows, selection, options, restricted, out)
    return out, lse


def _host_rows(rows: "AttentionRows") -> list[_Row]:
    start, kv_len = rows.query_start.tolist(), rows.kv_len.tolist()
    slot, sparse = rows.slot.tolist(), rows.sparse.tolist()
    return [_Row(r, start[r], start[r + 1], kv_len[r], slot[r], sparse[r])
            for r in range(len(kv_len)) if start[r + 1] > start[r] and kv_len[r] > 0]


def _probed_queries(probe: "Probe") -> "dict[int, list[tuple[int, int, int]]]":
    """Row index -> (scoring row, query index, token) of its probed queries."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for n, (tokens, row) in enumerate(zip(probe.token.tolist(), probe.row.tolist(), strict=True)):
        for i, token in enumerate(tokens):
            if token >= 0:
                found.setdefault(row, []).append((n, i, token))
    return found


def _gather(key_cache: Tensor, value_cache: Tensor, table: Tensor, kv_len: int,
            options: "AttentionOptions") -> tuple[Tensor, Tensor]:
    """Keys and values of positions [0, kv_len), float32 [n, KH, D]; a view where blocks lie in a row and allow it."""
    block_size = key_cache.shape[1]
    blocks = table[:-(-kv_len // block_size)].long()
    first = int(blocks[0])
    consecutive = bool((blocks == torch.arange(first, first + len(blocks), device=blocks.device)).all())

    def read(cache: Tensor, scale: float) -> Tensor:
        part = cache[first:first + len(blocks)] if consecutive else _take(cache, blocks)
        return _widen(part.flatten(0, 1)[:kv_len], scale)

    return read(key_cache, options.key_scale), read(value_cache, options.value_scale)


def _take(cache: Tensor, index: Tensor) -> Tensor:
    if cache.element_size() == 1:  # 8-bit floats have no indexing on some devices
        return cache.view(torch.uint8)[index].view(cache.dtype)
    return cache[index]


def _widen(part: Tensor, scale: float) -> Tensor:
    part = part.float()
    return part if scale == 1.0 else part * scale


def _attend_row(query: Tensor, key: Tensor, value: Tensor, options: "AttentionOptions") -> Tensor:
    """query float32 [q, H, D] at the end of n keys; key, value [n, KH, D]. Returns [q, H, D]."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    if num_queries <= FOLD_LIMIT or _is_explicit(query, options):
        tile = FOLD_LIMIT
    elif num_queries == num_keys and options.window is None:
        return _attend_tile(query, key, value, options, num_keys)
    else:
        tile = TILE
    parts = []
    for begin in range(0, num_queries, tile):
        end = min(begin + tile, num_queries)
        last = num_keys - num_queries + end  # keys seen by this tile's last query
        first = 0 if options.window is None else max(0, last - (end - begin) + 1 - options.window)
        parts.append(_attend_tile(query[begin:end], key[first:last], value[first:last], options, last - first))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_tile(query: Tensor, key: Tensor, value: Tensor, options: "AttentionOptions", num_keys: int) -> Tensor:
    """query [q, H, D] at the end of these n keys. Returns [q, H, D]."""
    num_queries, num_heads, dim = query.shape
    groups = num_heads // key.shape[1]
    grouped = query.view(num_queries, -1, groups, dim).permute(1, 2, 0, 3)  # [KH, G, q, D]
    keys, values = key.transpose(0, 1), value.transpose(0, 1)  # [KH, n, D]
    explicit = _is_explicit(query, options)
    causal = num_queries == num_keys and num_queries > FOLD_LIMIT and options.window is None and not explicit
    mask = None if causal or num_queries == 1 else _visible(num_queries, num_keys, options.window, query.device)
    if explicit:
        logits = _cap(torch.matmul(grouped, keys[:, None].mT) * options.scale, options)  # [KH, G, q, n]
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        out = torch.matmul(logits.softmax(-1), values[:, None])
    elif num_queries <= FOLD_LIMIT:
        folded = grouped.flatten(1, 2)[None]  # [1, KH, G * q, D]
        stacked = None if mask is None else mask.repeat(groups, 1)
        out = scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=stacked, scale=options.scale)
        out = out[0].view(-1, groups, num_queries, dim)
    else:
        wide = (key.shape[1], groups, num_keys, dim)
        out = scaled_dot_product_attention(grouped, keys[:, None].expand(wide), values[:, None].expand(wide),
                                           attn_mask=mask, is_causal=causal, scale=options.scale)
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, dim)


def _is_explicit(query: Tensor, options: "AttentionOptions") -> bool:
    """Whether to spell the arithmetic out. Off the CPU always: torch 2.11's fused float32 attention on CUDA gave a
    wrong last query under a mask when the number of queries was 1 more than a multiple of 64."""
    return options.softcap is not None or query.device.type != "cpu"


def _visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [q, n]: query i sits at key num_keys - num_queries + i."""
    position = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)
    mask = key <= position
    return mask if window is None else mask & (key > position - window)


def _cap(logits: Tensor, options: "AttentionOptions") -> Tensor:
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)


def _write_probe(query: Tensor, key: Tensor, row: _Row, options: "AttentionOptions", probe: "Probe",
                 queries: "list[tuple[int, int, int]] | tuple[()]", lse: Tensor) -> None:
    """Logits and log-sum-exp of the row's probed queries."""
    num_heads, dim = query.shape[1:]
    for n, i, token in queries:
        position = row.kv_len - row.end + token
        first = 0 if options.window is None else max(0, position + 1 - options.window)
        grouped = query[token].float().view(key.shape[1], -1, dim)  # [KH, G, D]
        seen = key[first:position + 1].permute(1, 2, 0)  # [KH, D, n]
        logits = _cap(torch.bmm(grouped, seen) * options.scale, options).view(num_heads, -1)
        probe.logits[n, i, :, first:position + 1] = logits.to(probe.logits.dtype)
        lse[token] = logits.logsumexp(-1)


def _attend_restricted(query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: "AttentionRows",
                       selection: "RowSelection", options: "AttentionOptions", restricted: list[_Row],
                       out: Tensor) -> None:
    """All sparse rows in one padded gather: sinks, listed units, tail."""
    device = query.device
    assert all(row.end - row.begin == 1 for row in restricted), "a sparse row has one query token"
    slot = torch.tensor([row.slot for row in restricted], device=device)
    token = torch.tensor([row.begin for row in restricted], device=device)
    kv_len = torch.tensor([row.kv_len for row in restricted], device=device)
    position, valid = _restricted_positions(rows, selection, slot, kv_len)  # [R, K]
    if options.window is not None:
        valid &= position > kv_len[:, None] - 1 - options.window
    block_size = key_cache.shape[1]
    safe = torch.where(valid, position, 0)
    physical = rows.block_table[slot].long().gather(1, safe // block_size) * block_size + safe % block_size  # [R, K]
    key = _widen(_take(key_cache.flatten(0, 1), physical), options.key_scale)  # [R, K, KH, D]
    value = _widen(_take(value_cache.flatten(0, 1), physical), options.value_scale)
    num_rows, _, kv_heads, dim = key.shape
    grouped = query[token].float().view(num_rows, kv_heads, -1, dim)  # [R, KH, G, D]
    logits = torch.matmul(grouped, key.permute(0, 2, 3, 1)) * options.scale  # [R, KH, G, K]
    logits = _cap(logits, options).masked_fill(~valid[:, None, None], -torch.inf)
    value = torch.where(valid[..., None, None], value, 0.0).transpose(1, 2)  # [R, KH, K, D]
    out[token] = torch.matmul(logits.softmax(-1), value).view(num_rows, -1, dim).to(out.dtype)


def _restricted_positions(rows: "AttentionRows", selection: "RowSelection", slot: Tensor,
                          kv_len: Tensor) -> tuple[Tensor, Tensor]:
    """Key positions of sparse rows, padded to the longest: (position int64 [R, K], valid bool [R, K])."""
    unit, tail_start = selection.unit, rows.tail_start[slot].long()[:, None]  # [R, 1]
    count = selection.num_units[slot].long()[:, None]
    num_units, num_tail = int(count.max()), int((kv_len[:, None] - tail_start).max())
    sinks = torch.arange(selection.sinks, device=slot.device).expand(len(slot), -1)
    offset = torch.arange(unit, device=slot.device)
    listed = (selection.units[slot, :num_units].long()[..., None] * unit + offset).flatten(1)
    tail = tail_start + torch.arange(num_tail, device=slot.device)
    listed_valid = (torch.arange(num_units * unit, device=slot.device) < count * unit)
    position = torch.cat([sinks, listed, tail], 1)
    valid = torch.cat([sinks < torch.minimum(tail_start, kv_len[:, None]), listed_valid, tail < kv_len[:, None]], 1)
    return position, valid
