"""Which rows of a step are long prompt chunks, for a library's attention, and what is left of the step without them.

Planned on the host from what it knows of the rows, with copies that nobody waits for. Letters: T query tokens of the
step, U of them left to the other backend, Q and N queries and keys of a group of chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from aspire.attention.rows import AttentionRows, HostRow, Probe


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Chunks that one call of a library serves: their queries and their keys follow each other."""

    spans: tuple[tuple[int, int], ...]  # query tokens of the step, per chunk
    keys: Tensor  # int64 [N] places in the cache, all keys of the first chunk first
    query_start: Tensor  # int32 [chunks + 1]
    key_start: Tensor  # int32 [chunks + 1]
    num_keys: tuple[int, ...]  # per chunk

    @property
    def num_queries(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.spans)


@dataclass(frozen=True, slots=True)
class Split:
    """A step's chunks, and its other queries as a smaller step with the same rows."""

    groups: tuple[ChunkGroup, ...]
    tokens: Tensor  # int64 [U]
    place: Tensor  # int64 [T]: index in `tokens`, -1: of a chunk
    rows: AttentionRows

    def probe(self, probe: Probe) -> Probe:
        """The probe by places in `tokens`."""
        token = torch.where(probe.token >= 0, self.place[probe.token.clamp(min=0).long()], -1)
        return Probe(token.int(), probe.row, probe.logits)


@dataclass(frozen=True, slots=True)
class _Chunk:
    begin: int
    end: int
    slot: int
    num_keys: int


def split_rows(rows: AttentionRows, num_tokens: int, block_size: int, *, least: int, most_keys: int) -> Split | None:
    """The rows with `least` queries that are not probed; None where there is none.

    Probed queries, the last few of a prompt, stay with the other backend, which writes their logits, as a row of
    their own. most_keys: of a group with more than one chunk.
    """
    starts = [0]
    for row in rows.host:
        starts.append(starts[-1] + row.num_queries)
    chunks = {index: _chunk(row, begin) for index, (row, begin) in enumerate(zip(rows.host, starts, strict=False))
              if row.kv_len is not None and row.num_queries - row.num_probed >= least}
    if not chunks:
        return None
    lengths: list[int] = []
    kept: list[int] = []
    for index, (begin, end) in enumerate(pairwise(starts)):
        first = chunks[index].end if index in chunks else begin
        kept += range(first, end)
        lengths.append(end - first)
    kept += range(starts[-1], num_tokens)  # padding
    device = rows.query_start.device
    tokens = _to_device(kept, torch.int64, device)
    place = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    place[tokens] = torch.arange(len(kept), device=device)
    rest = replace(rows, query_start=_starts(lengths, device), max_query_len=max(1, *lengths), host=tuple(
        row._replace(num_queries=length) for row, length in zip(rows.host, lengths, strict=True)))
    groups = tuple(_group(members, rows.block_table, block_size)
                   for members in _batches(list(chunks.values()), most_keys))
    return Split(groups, tokens, place, rest)


def _chunk(row: HostRow, begin: int) -> _Chunk:
    assert row.kv_len is not None, "the host knows where a prompt's chunk lies"
    return _Chunk(begin, begin + row.num_queries - row.num_probed, row.slot, row.kv_len - row.num_probed)


def _batches(chunks: Sequence[_Chunk], most_keys: int) -> list[list[_Chunk]]:
    """In order, as many together as `most_keys` allows."""
    batches: list[list[_Chunk]] = []
    total = 0
    for chunk in chunks:
        if not batches or total + chunk.num_keys > most_keys:
            batches.append([])
            total = 0
        batches[-1].append(chunk)
        total += chunk.num_keys
    return batches


def _group(chunks: Sequence[_Chunk], block_table: Tensor, block_size: int) -> ChunkGroup:
    device = block_table.device
    offset = torch.arange(block_size, device=device)
    keys = []
    for chunk in chunks:
        blocks = block_table[chunk.slot, :-(-chunk.num_keys // block_size)].long()
        keys.append((blocks[:, None] * block_size + offset).flatten()[:chunk.num_keys])
    lengths = tuple(chunk.num_keys for chunk in chunks)
    return ChunkGroup(tuple((chunk.begin, chunk.end) for chunk in chunks),
                      keys[0] if len(keys) == 1 else torch.cat(keys),
                      _starts([chunk.end - chunk.begin for chunk in chunks], device), _starts(lengths, device), lengths)


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return _to_device(starts, torch.int32, device)


def _to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
