"""paged_attention on CUDA: plans a step's work on the device, then one launch per layer for all rows of the batch.

Nothing waits for the device and grid sizes follow from host-side bounds alone, so a step can be captured in a graph.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection
from aspire.ops.paged_attention.combine import combine_kernel
from aspire.ops.paged_attention.kernels import attend_kernel
from aspire.ops.paged_attention.work_list import FIELDS, TOKEN_FIELDS, plan_kernel

TAIL_GUESS = 96  # keys of a sparse row after its list: the window and a few drafts
ITEM_OVERHEAD = 256  # keys that a program reads in the time that starting an item takes


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Tile shapes and schedule.

    Bits of a full row depend on packed_rows, key_tile, fine, coarse, num_fine and warps, on nothing else, if
    packed_rows is fixed; if not, also on the longest row in the batch and on how many rows there are. Those of a
    sparse row depend on the number of rows (through the length of its pieces), which no accepted token shows.
    """

    packed_rows: int | None = None  # query rows (tokens x group) of a tile: 16, 32, 64; None: 64 where a row needs it
    key_tile: int | None = None  # keys per inner step; None: by head dim
    fine: int = 512  # keys of each of the first num_fine pieces of a row
    num_fine: int = 8
    coarse: int = 2048  # keys of the pieces after; half of it beside sparse rows in small batches, see _coarse
    list_piece: int | None = None  # keys of a sparse row's pieces; None: such that they go round the grid once
    held_back: float = 1.0  # sparse items left for the end, in those that all programs do while one does a long item
    max_tiles: int = 4  # rows of more query tiles than this are not split over keys
    warps: int = 4
    stages: int = 5  # of the loop over a full row's keys
    list_stages: int = 7  # of the loop over a sparse row's keys, whose loads wait for two others
    small_tiles: bool | None = None  # where everything is read, rows of one query have tiles of their own size, whose
    # bits differ from those of large ones; None: unless packed_rows is fixed
    registers: int | None = None  # a cap per thread, so that more programs fit at once
    programs_per_sm: int | None = None  # as many as fit at once, as each starts with an item of its own; None: a guess
    partial_bytes: int = 512 << 20  # the most memory for pieces; rows that do not fit are not split


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Host-side constants of one launch; the key of a plan."""

    packed_rows: int
    tokens_per_tile: int
    window: int
    list_tokens: int  # most listed tokens of a sparse row; -1: no row is restricted
    sinks: int
    list_piece: int
    coarse: int
    small: bool  # rows of one query have tiles of their own size


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step's work on the device; see plan_kernel."""

    may_tile: bool  # whether a row may be too long or the pieces too many, so that a second launch is needed
    items: Tensor
    tiled_items: Tensor
    tokens: Tensor
    counters: Tensor


class PagedAttention:
    """Launches the kernels; holds the current step's plans and the buffer of pieces."""

    def __init__(self, config: KernelConfig | None = None) -> None:
        self.config = config or KernelConfig()
        self._rows: AttentionRows | None = None
        self._plans: dict[_Geometry, _Plan] = {}
        self._partial: tuple[Tensor, Tensor] | None = None
        self._num_sms: int | None = None

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: AttentionRows,
                 selection: RowSelection | None, options: AttentionOptions,
                 probe: Probe | None) -> tuple[Tensor, Tensor | None]:
        """Same contract as the reference; plans once per `rows` object and kind of layer."""
        assert query.stride(2) == 1, "head dim is contiguous"
        for cache in (key_cache, value_cache):
            assert cache.stride(3) == 1, "head dim is contiguous"
            assert cache.stride(0) == cache.shape[1] * cache.stride(1), "a block's tokens follow each other"
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = None if probe is None else torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        geometry = self._geometry(query, key_cache, rows, selection, options)
        plan = self._plan(rows, geometry, query, key_cache.shape[2])
        self._launch(query, key_cache, value_cache, rows, selection, options, probe, out, lse, geometry, plan)
        return out, lse

    def _geometry(self, query: Tensor, key_cache: Tensor, rows: AttentionRows, selection: RowSelection | None,
                  options: AttentionOptions) -> _Geometry:
        kv_heads = key_cache.shape[2]
        groups = query.shape[1] // kv_heads
        packed = self.config.packed_rows
        if packed is None:  # float32 goes through plain registers, too few for more
            packed = 16 if rows.max_query_len * groups <= 16 or query.element_size() == 4 else 64
        packed = max(packed, triton.next_power_of_2(groups))
        list_tokens, sinks, list_piece = -1, 0, 1024
        if selection is not None:
            list_tokens, sinks = selection.units.shape[1] * selection.unit, selection.sinks
            pieces = max(1, self._programs(query.device, 2) // (len(rows.kv_len) * kv_heads))  # of a row
            piece = triton.cdiv(list_tokens + sinks + TAIL_GUESS, pieces)
            list_piece = self.config.list_piece or max(128, triton.cdiv(piece, 64) * 64)
        small = self.config.packed_rows is None if self.config.small_tiles is None else self.config.small_tiles
        small = small and selection is None and packed > self._small(groups)
        coarse = self._coarse(len(rows.kv_len) * kv_heads, selection, self._programs(query.device, 1))
        return _Geometry(packed, packed // groups, options.window or 0, list_tokens, sinks, list_piece, coarse, small)

    def _coarse(self, num_tiles: int, selection: RowSelection | None, sms: int) -> int:
        """Short pieces where few rows are likely to be full, so that their items spread over all programs."""
        few = self.config.packed_rows is None and selection is not None and num_tiles <= sms
        return max(self.config.fine, self.config.coarse // 2) if few else self.config.coarse

    def _small(self, groups: int) -> int:
        """Packed rows of a tile with one query."""
        return max(16, int(triton.next_power_of_2(groups)))

    def _held_back(self, geometry: _Geometry, kv_heads: int, programs: int) -> int:
        """Sparse items (each for all key heads) to leave for the end of the work list."""
        short = min(geometry.list_piece, geometry.list_tokens + TAIL_GUESS) + ITEM_OVERHEAD
        return int(self.config.held_back * programs * geometry.coarse / (kv_heads * short))

    def _plan(self, rows: AttentionRows, geometry: _Geometry, query: Tensor, kv_heads: int) -> _Plan:
        if rows is not self._rows:
            self._rows, self._partial = rows, None
            self._plans.clear()
        if geometry not in self._plans:
            self._plans[geometry] = self._make_plan(rows, geometry, query, kv_heads)
        return self._plans[geometry]

    def _pieces(self, num_keys: int, coarse: int) -> int:
        config = self.config
        rest = max(0, num_keys - config.num_fine * config.fine)
        return -(-min(num_keys, config.num_fine * config.fine) // config.fine) - (-rest // coarse)

    def _make_plan(self, rows: AttentionRows, geometry: _Geometry, query: Tensor, kv_heads: int) -> _Plan:
        config, device = self.config, query.device
        num_tokens, num_heads, dim = query.shape
        num_rows, pieces = len(rows.kv_len), self._pieces(rows.max_kv_len, geometry.coarse)
        list_pieces = 0 if geometry.list_tokens < 0 else num_rows * -(-rows.max_kv_len // geometry.list_piece)
        split_tokens = min(num_tokens, num_rows * geometry.tokens_per_tile * config.max_tiles)
        wanted = split_tokens * pieces + list_pieces  # a restricted row has one token
        capacity = max(1, min(wanted, config.partial_bytes // (num_heads * (dim + 1) * 4)))
        if self._partial is None or len(self._partial[0]) < capacity:
            self._partial = (torch.empty(capacity, num_heads, dim, dtype=torch.float32, device=device),
                             torch.empty(capacity, num_heads, dtype=torch.float32, device=device))
        tiles = min(num_tokens, num_tokens // geometry.tokens_per_tile + num_rows)
        longest = -(-rows.max_query_len // geometry.tokens_per_tile)
        items = max(1, tiles * pieces + list_pieces) * FIELDS.value
        ints = [torch.empty(size, dtype=torch.int32, device=device)
                for size in (items, max(1, tiles) * FIELDS.value, num_tokens * TOKEN_FIELDS.value, 4)]
        plan = _Plan(longest > config.max_tiles or capacity < wanted, *ints)
        plan_kernel[(num_rows + 1,)](
            rows.query_start, rows.kv_len, rows.slot, rows.sparse.view(torch.uint8), rows.tail_start, *ints, num_rows,
            num_tokens, len(self._partial[0]), geometry.list_tokens, geometry.sinks,
            self._held_back(geometry, kv_heads, self._programs(device, 2)), geometry.coarse, geometry.list_piece,
            RP=max(128, triton.next_power_of_2(num_rows)), TM=geometry.tokens_per_tile, MAX_TILES=config.max_tiles,
            FINE=config.fine, NUM_FINE=config.num_fine, RESTRICT=geometry.list_tokens >= 0,
            WINDOW=geometry.window, SMALL=geometry.small, BLOCK=128, num_warps=4)
        return plan

    def _launch(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: AttentionRows,
                selection: RowSelection | None, options: AttentionOptions, probe: Probe | None, out: Tensor,
                lse: Tensor | None, geometry: _Geometry, plan: _Plan) -> None:
        config, kv_heads = self.config, key_cache.shape[2]
        num_heads, dim = query.shape[1:]
        assert self._partial is not None
        partial, partial_lse = self._partial
        spare = plan.counters
        units, num_units, has_places = spare[None], spare, False
        if selection is not None:
            units, num_units = selection.units, selection.num_units
            if selection.places is not None and options.window is None:  # a window needs positions
                units, has_places = selection.places, True
        probe_row, probe_token, logits = (spare, spare[None], partial[None]) if probe is None else (
            probe.row, probe.token, probe.logits)
        queries = 0 if probe is None else probe_token.shape[1]
        direct = (probe is not None and query.element_size() == 2 and query.device.type == "cuda"
                  and logits.dtype == torch.bfloat16 and logits.stride(2) % 2 == 0)
        fitting = 3 if geometry.packed_rows == 16 and selection is None and query.element_size() == 2 else 2
        for tiled in (False, True) if plan.may_tile else (False,):
            attend_kernel[(self._programs(query.device, fitting),)](
                query, key_cache, value_cache, rows.block_table, units, num_units,
                plan.tiled_items if tiled else plan.items, plan.counters, out, partial_lse if lse is None else lse,
                partial, partial_lse, probe_row, probe_token, logits, options.scale * options.key_scale,
                options.softcap or 0.0, options.value_scale, geometry.sinks, probe_row.shape[0],
                geometry.coarse, geometry.list_piece, query.stride(0), query.stride(1), key_cache.stride(1),
                key_cache.stride(2), value_cache.stride(1), value_cache.stride(2),
                rows.block_table.stride(0), units.stride(0), logits.stride(0), logits.stride(1), logits.stride(2),
                KH=kv_heads, G=num_heads // kv_heads, D=dim, DP=triton.next_power_of_2(dim), M=geometry.packed_rows,
                MS=self._small(num_heads // kv_heads), TM=geometry.tokens_per_tile, BN=self._key_tile(query),
                BS=key_cache.shape[1], UNIT=1 if selection is None else selection.unit, FINE=config.fine,
                NUM_FINE=config.num_fine, RESTRICT=selection is not None, WINDOW=geometry.window,
                SOFTCAP=options.softcap is not None, PROBE_P=triton.next_power_of_2(max(1, queries)),
                NP=max(64, triton.next_power_of_2(probe_row.shape[0])), DIRECT=direct, TILED=tiled,
                PROBE=queries, SMALL=geometry.small, PLACES=has_places,
                PRECISION="ieee" if query.dtype == torch.float32 else "tf32", STAGES=config.stages,
                LIST_STAGES=config.list_stages, num_warps=config.warps, maxnreg=config.registers)
        combine_kernel[(len(query), kv_heads)](
            plan.tokens, plan.counters, out, partial_lse if lse is None else lse, partial, partial_lse,
            options.value_scale, KH=kv_heads, G=num_heads // kv_heads,
            GP=triton.next_power_of_2(num_heads // kv_heads), D=dim, DP=triton.next_power_of_2(dim), PROBE=queries,
            UNROLL=24 if query.device.type == "cuda" else 2, num_warps=4)

    def _key_tile(self, query: Tensor) -> int:
        """16 KB of keys."""
        if self.config.key_tile is not None:
            return self.config.key_tile
        return int(max(16, 16384 // (triton.next_power_of_2(query.shape[2]) * query.element_size())))

    def _programs(self, device: torch.device, fitting: int) -> int:
        if self._num_sms is None:
            self._num_sms = (int(torch.cuda.get_device_properties(device).multi_processor_count)
                             if device.type == "cuda" else 2)
        return self._num_sms * (self.config.programs_per_sm or fitting)


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: "AttentionRows",
                    selection: "RowSelection | None", options: "AttentionOptions",
                    probe: "Probe | None") -> tuple[Tensor, Tensor | None]:
    """See reference.py. Plans anew at every call; `PagedAttention` plans once per step."""
    return PagedAttention()(query, key_cache, value_cache, rows, selection, options, probe)
