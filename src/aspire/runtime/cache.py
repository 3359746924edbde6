"""Device memory of a run: the paged KV cache, the stored selections and the state of every slot.

Slots are numbered 0..S-1; one more slot, number S, is scratch that padding rows write to.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aspire.attention.rows import RowSelection
from aspire.ops.select_topk.lists import Places
from aspire.speculation.layers import LayerPlan
from aspire.speculation.selection import SelectionConfig


@dataclass(frozen=True, slots=True)
class KVShape:
    """Dimensions of the KV cache; one key and one value tensor per layer."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_block(self, dtype: torch.dtype) -> int:
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * dtype.itemsize


class KVCache:
    """Keys and values by layer: two tensors [num_blocks, block_size, kv_heads, head_dim] each."""

    def __init__(self, shape: KVShape, *, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.shape = shape
        self.key = [_zeros(size, dtype, device) for _ in range(shape.num_layers)]
        self.value = [_zeros(size, dtype, device) for _ in range(shape.num_layers)]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages the CPU touches only when written: a pool is sized for the worst case."""
    if device.type != "cpu":
        if dtype.itemsize == 1:
            return torch.zeros(size, dtype=torch.uint8, device=device).view(dtype)
        return torch.zeros(size, dtype=dtype, device=device)
    count = int(np.prod(size)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(size)


class Selection:
    """The stored lists of every slot, and how many units and which tail belong to a context length.

    The two tables are filled by `SelectionConfig` itself, so host and device agree by construction. A slot's new owner
    needs no clearing: its first full row that samples anchors the tail, and that row's scores, or a refresh layer's in
    the same draft, set every list before a sparse row reads it (between renewals: that row's scores alone).
    """

    def __init__(self, layers: LayerPlan, config: SelectionConfig, *, num_slots: int, max_model_len: int,
                 block_size: int, device: torch.device) -> None:
        self.config = config
        self.capacity = max(1, config.capacity(max_model_len))
        lists = max(1, layers.num_lists)
        self.units = torch.zeros(lists, num_slots + 1, self.capacity, dtype=torch.int32, device=device)
        self.num_units = torch.zeros(lists, num_slots + 1, dtype=torch.int32, device=device)
        # A running request keeps its blocks, so where a unit lies is looked up once, when it is chosen.
        self.per_block = block_size // config.unit if block_size % config.unit == 0 else 0
        self.places = torch.zeros_like(self.units) if self.per_block else None
        self.tail_start = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.quota = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)  # units to select, per slot
        lengths = range(max_model_len + 1)
        self.quota_of = torch.tensor([config.num_units(n) for n in lengths], dtype=torch.int32, device=device)
        self.tail_of = torch.tensor([config.tail_start(n) for n in lengths], dtype=torch.int32, device=device)
        self.first_unit = -(-config.sinks // config.unit)
        # Scores of the last verification in layers that renew lists, where fresh scores are mixed with them.
        kept = sum(bool(renewed) for renewed in layers.draft_writes) if config.merge == "mix" else 0
        self.verified = torch.zeros(kept, num_slots + 1, -(-max_model_len // config.unit), device=device)

    def view(self, index: int) -> RowSelection:
        places = None if self.places is None else self.places[index]
        return RowSelection(self.units[index], self.num_units[index], self.config.unit, self.config.sinks, places)

    def places_in(self, block_table: Tensor) -> Places | None:
        """What keeps the places of newly chosen units."""
        return None if self.places is None else Places(self.places, block_table, self.per_block)

    def mix(self, place: int, slots: Tensor, scores: Tensor, num_verify: int) -> None:
        """Keep the first `num_verify` rows of scores [N, U]; add the kept ones to the others, weighed by `config.mix`.
        place: number of the layer among those that renew lists. A candidate lies below its slot's tail, hence was
        scored by the verification that set the tail."""
        width = min(scores.shape[1], self.verified.shape[2])
        kept = self.verified[place]
        kept[slots[:num_verify], :width] = scores[:num_verify, :width]
        scores[num_verify:, :width] += self.config.mix * kept[slots[num_verify:], :width]


class SlotState:
    """Device truth of each slot: how many tokens it knows, the last one, the drafts after it, its block table."""

    def __init__(self, *, num_slots: int, draft_limit: int, blocks_per_slot: int, block_size: int,
                 device: torch.device) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.num_known = torch.ones(num_slots + 1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(num_slots + 1, draft_limit + 1, dtype=torch.int64, device=device)  # last, drafts
        self.block_table = torch.zeros(num_slots + 1, blocks_per_slot, dtype=torch.int32, device=device)

    @property
    def scratch(self) -> int:
        return self.num_slots

    def admit(self, slots: Tensor, num_known: Tensor) -> None:
        """Slots int64 [A] have new owners, who know that many tokens, int64 [A]."""
        self.num_known.index_copy_(0, slots, num_known)
        self.tokens.index_fill_(0, slots, 0)
