"""Which rows of a step are long prompt chunks, for a library's attention.

Planned on the host from what it knows of the rows, with copies that nobody waits for. Letters: Q and N queries and keys
of a group of chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.attention.rest import Rest, leave, starts_of, to_device
from aspire.attention.rows import AttentionRows, HostRow


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
    """A step's chunks, and its other queries."""

    groups: tuple[ChunkGroup, ...]
    rest: Rest


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
    taken = [row.num_queries - row.num_probed if row.kv_len is not None else 0 for row in rows.host]
    taken = [count if count >= least else 0 for count in taken]
    begins = starts_of([row.num_queries for row in rows.host])
    chunks = [_chunk(row, begin) for row, begin, count in zip(rows.host, begins, taken, strict=False) if count]
    if not chunks:
        return None
    groups = tuple(_group(members, rows.block_table, block_size) for members in _batches(chunks, most_keys))
    return Split(groups, leave(rows, [row.num_queries for row in rows.host], taken, num_tokens))


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
                      to_device(starts_of([chunk.end - chunk.begin for chunk in chunks]), torch.int32, device),
                      to_device(starts_of(lengths), torch.int32, device), lengths)
