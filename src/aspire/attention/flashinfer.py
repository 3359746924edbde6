"""A backend that gives full rows to FlashInfer's paged attention, where that package is installed.

FlashInfer plans on the host, so lengths are read from the device once a step: such steps wait for the device and are
not captured in graphs. Rows that read a selection, and queries whose logits are probed, stay with another backend.
Results depend on the batch. The only file that imports flashinfer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from aspire.attention.protocol import AttentionBackend
from aspire.attention.rest import Rest, leave, starts_of, to_device
from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection

WORKSPACE_BYTES = 128 << 20
HEAD_DIMS = (64, 128, 256)


class PagedWrapper(Protocol):
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper: planned once a step, run once a layer."""

    def plan(self, *args: Any, **options: Any) -> None: ...

    def run(self, query: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor: ...


class FlashInfer(Protocol):
    """What is used of the package."""

    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> Callable[[Tensor, str], PagedWrapper]: ...


def load_flashinfer() -> FlashInfer:
    """The package. Raises ValueError that says what to install."""
    try:
        import flashinfer
    except ImportError as error:
        raise ValueError("attention_backend flashinfer needs a package that is not there: pip install "
                         f"flashinfer-python ({error})") from None
    module: FlashInfer = flashinfer
    return module


class _Row(NamedTuple):
    """What the device knows of a row."""

    num_queries: int
    kv_len: int
    slot: int
    sparse: bool
    num_probed: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that share a plan."""

    view: int
    restricted: bool
    probed: bool
    options: AttentionOptions


@dataclass(frozen=True, slots=True)
class _Plan:
    """wrapper: None where no query is FlashInfer's."""

    rows: AttentionRows  # that it was made for
    wrapper: PagedWrapper | None
    tokens: Tensor  # int64: FlashInfer's queries
    rest: Rest


class FlashInferAttention:
    """An AttentionBackend that plans each kind of layer once a step."""

    name = "flashinfer"
    captures = False

    def __init__(self, backend: AttentionBackend, library: FlashInfer, *,
                 dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)) -> None:
        self._backend = backend
        self._library = library
        self._dtypes = dtypes
        self._workspace: Tensor | None = None
        self._seen: dict[int, tuple[AttentionRows, tuple[_Row, ...]]] = {}  # by view
        self._wrappers: dict[_Kind, PagedWrapper] = {}
        self._plans: dict[_Kind, _Plan] = {}

    def store(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
              options: AttentionOptions | None = None) -> None:
        """See ops.store_kv."""
        self._backend.store(key, value, key_cache, value_cache, slot_mapping, options)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: AttentionRows,
               selection: RowSelection | None, options: AttentionOptions,
               probe: Probe | None) -> tuple[Tensor, Tensor | None]:
        """See ops.paged_attention."""
        if query.dtype not in self._dtypes or query.shape[2] not in HEAD_DIMS:
            return self._backend.attend(query, key_cache, value_cache, rows, selection, options, probe)
        kind = _Kind(rows.view, selection is not None, probe is not None, options)
        plan = self._plans.get(kind)
        if plan is None or plan.rows is not rows:
            plan = self._plans[kind] = self._make_plan(kind, query, key_cache, rows)
        if plan.wrapper is None:
            return self._backend.attend(query, key_cache, value_cache, rows, selection, options, probe)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        found = plan.wrapper.run(query[plan.tokens], (key_cache, value_cache))
        out[plan.tokens] = found if options.value_scale == 1.0 else found * options.value_scale
        return out, plan.rest.attend(self._backend, query, (key_cache, value_cache), selection, options, probe, out)

    def _make_plan(self, kind: _Kind, query: Tensor, key_cache: Tensor, rows: AttentionRows) -> _Plan:
        known = self._look(rows)
        taken = [_num_taken(kind, row) for row in known]
        rest = leave(rows, [row.num_queries for row in known], taken, len(query))
        own = len(self._plans) if kind not in self._plans else list(self._plans).index(kind)
        rest = replace(rest, rows=replace(rest.rows, view=2 + own))  # the other backend keeps a plan for each
        begins = starts_of([row.num_queries for row in known])
        tokens = [token for begin, count in zip(begins, taken, strict=False) for token in range(begin, begin + count)]
        wrapper = self._plan_wrapper(kind, query, key_cache, rows, taken) if tokens else None
        return _Plan(rows, wrapper, to_device(tokens, torch.int64, query.device), rest)

    def _look(self, rows: AttentionRows) -> tuple[_Row, ...]:
        """The rows as the device knows them: waits for it."""
        seen = self._seen.get(rows.view)
        if seen is not None and seen[0] is rows:
            return seen[1]
        count = len(rows.kv_len)
        numbers = torch.cat([rows.query_start, rows.kv_len, rows.slot, rows.sparse.int()]).tolist()
        starts, rest = numbers[:count + 1], numbers[count + 1:]
        known = []
        for r in range(count):
            queries = starts[r + 1] - starts[r]
            probed = rows.host[r].num_probed if rows.host else queries
            known.append(_Row(queries, rest[r], rest[count + r], bool(rest[2 * count + r]), probed))
        self._seen[rows.view] = rows, tuple(known)
        return self._seen[rows.view][1]

    def _plan_wrapper(self, kind: _Kind, query: Tensor, key_cache: Tensor, rows: AttentionRows,
                      taken: list[int]) -> PagedWrapper:
        options, block_size = kind.options, key_cache.shape[1]
        served = [(row, count) for row, count in zip(self._look(rows), taken, strict=True) if count]
        lengths = [row.kv_len - row.num_queries + count for row, count in served]
        pages = [-(-length // block_size) for length in lengths]
        width = rows.block_table.shape[1]
        entries = torch.cat([torch.arange(row.slot * width, row.slot * width + count)
                             for (row, _), count in zip(served, pages, strict=True)])
        if kind not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            self._wrappers[kind] = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        wrapper = self._wrappers[kind]
        last = [length - (count - 1) * block_size for length, count in zip(lengths, pages, strict=True)]
        query_start, page_start, last_len = (  # on the host, where the package wants them
            torch.tensor(numbers, dtype=torch.int32)
            for numbers in (starts_of([count for _, count in served]), starts_of(pages), last))
        wrapper.plan(
            query_start, page_start, rows.block_table.flatten()[entries.to(query.device)], last_len,
            num_qo_heads=query.shape[1], num_kv_heads=key_cache.shape[2], head_dim_qk=query.shape[2],
            page_size=block_size, causal=True, sm_scale=options.scale * options.key_scale,
            window_left=-1 if options.window is None else options.window - 1, logits_soft_cap=options.softcap,
            q_data_type=query.dtype, kv_data_type=key_cache.dtype)
        return wrapper


def _num_taken(kind: _Kind, row: _Row) -> int:
    """How many of a row's first queries FlashInfer serves."""
    if row.kv_len == 0 or (row.sparse and kind.restricted):
        return 0
    return row.num_queries - (row.num_probed if kind.probed else 0)
