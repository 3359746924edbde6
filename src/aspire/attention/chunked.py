"""A backend that gives long prompt chunks to a library's attention and everything else to another backend.

Long chunks are bound by arithmetic, where a library's kernel is faster than one made for mixed rows, even though their
keys are gathered from the paged cache first. The bits of such a query depend on its chunk: not for batch-invariant use.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from aspire.attention.chunks import ChunkGroup, Split, split_rows
from aspire.attention.libraries import ChunkLibrary
from aspire.attention.protocol import AttentionBackend
from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection

LEAST_QUERIES = 256
MOST_KEYS = 1 << 16  # gathered for one call: 256 MiB at 8 key heads of 128 in 16 bits


class ChunkedAttention:
    """An AttentionBackend that splits each view of a step once. Layers with a sliding window or a soft cap are not
    split."""

    def __init__(self, new_backend: Callable[[], AttentionBackend], library: ChunkLibrary, *,
                 least: int = LEAST_QUERIES, most_keys: int = MOST_KEYS) -> None:
        assert least >= 1, "a chunk has queries"
        self._whole = new_backend()
        self._rest = new_backend()  # of its own, because a backend plans anew whenever the rows change
        self._library = library
        self._least = least
        self._most_keys = most_keys
        self._splits: dict[int, tuple[AttentionRows, Split | None]] = {}  # by view

    @property
    def name(self) -> str:
        return f"{self._whole.name}+{self._library.name}"

    @property
    def captures(self) -> bool:
        return self._whole.captures  # captured steps have no chunks

    def store(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
              options: AttentionOptions | None = None) -> None:
        """See ops.store_kv."""
        self._whole.store(key, value, key_cache, value_cache, slot_mapping, options)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: AttentionRows,
               selection: RowSelection | None, options: AttentionOptions,
               probe: Probe | None) -> tuple[Tensor, Tensor | None]:
        """See ops.paged_attention."""
        split = self._split_of(query, key_cache, rows, options)
        if split is None:
            return self._whole.attend(query, key_cache, value_cache, rows, selection, options, probe)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in split.groups:
            self._attend_group(query, key_cache, value_cache, group, options, out)
        return out, split.rest.attend(self._rest, query, (key_cache, value_cache), selection, options, probe, out)

    def _split_of(self, query: Tensor, key_cache: Tensor, rows: AttentionRows,
                  options: AttentionOptions) -> Split | None:
        if not rows.host or options.window is not None or options.softcap is not None:
            return None
        if not self._library.supports(query):
            return None
        known = self._splits.get(rows.view)
        if known is not None and known[0] is rows:
            return known[1]
        split = split_rows(rows, len(query), key_cache.shape[1], least=self._least, most_keys=self._most_keys)
        self._splits[rows.view] = rows, split
        return split

    def _attend_group(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, group: ChunkGroup,
                      options: AttentionOptions, out: Tensor) -> None:
        parts = [query[begin:end] for begin, end in group.spans]
        key, value = (_take(cache, group.keys, query.dtype) for cache in (key_cache, value_cache))
        found = self._library(parts[0] if len(parts) == 1 else torch.cat(parts), key, value, group,
                              options.scale * options.key_scale)
        if options.value_scale != 1.0:
            found = found * options.value_scale
        for (begin, end), part in zip(group.spans, found.split(group.num_queries), strict=True):
            out[begin:end] = part


def _take(cache: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values at places [N] of a cache: [N, KH, D]."""
    flat = cache.flatten(0, 1)
    if cache.element_size() == 1:  # 8-bit floats have no indexing on some devices
        return flat.view(torch.uint8).index_select(0, index).view(cache.dtype).to(dtype)
    return flat.index_select(0, index).to(dtype)
