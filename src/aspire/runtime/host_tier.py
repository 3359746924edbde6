"""HostTier: the parts of KV offload that an engine with `kv_offload_gb` has, made together."""

import warnings
from dataclasses import dataclass

import torch

from aspire.runtime.cache import KVCache
from aspire.runtime.host_memory import host_blocks
from aspire.runtime.lanes import InlineLane, StreamLane
from aspire.runtime.offload import BlockMover, CopyBlocks, Transfer
from aspire.runtime.rates import compute_seconds, copy_seconds
from aspire.schedule.host import HostPool
from aspire.schedule.offload import CopyPrice, Offload
from aspire.speculation.cost import CostModel

NOMINAL_STEP = 0.01  # seconds; of a decoding step that nobody has measured


@dataclass(frozen=True, slots=True)
class HostTier:
    """offload decides (the scheduler's part), mover carries out (the runner's)."""

    offload: Offload
    mover: BlockMover
    price: CopyPrice


def host_tier(gibibytes: float, cache: KVCache, copy_blocks: CopyBlocks, *, num_parameters: int, dtype: torch.dtype,
              cost: CostModel, max_num_seqs: int) -> HostTier | None:
    """None when nothing is asked for, and, with a warning, where computing anew is faster than copying back.

    dtype: the model's. Raises ValueError where the host has not that much memory, or it cannot be locked.
    """
    if not gibibytes:
        return None
    device = cache.key[0].device
    block_bytes = cache.shape.bytes_per_block(cache.key[0].dtype)
    num_blocks = host_blocks(gibibytes, block_bytes)
    transfer = Transfer(cache, num_blocks, copy_blocks)
    price = CopyPrice(
        copy=copy_seconds(transfer), compute=compute_seconds(num_parameters, cache.shape.block_size, dtype, device),
        step=cost.step_seconds(max_num_seqs, 0) if cost.fitted else NOMINAL_STEP)
    if not price.pays:
        warnings.warn(f"kv_offload_gb is not used: a block of {block_bytes} bytes comes back from host memory in "
                      f"{1e6 * price.copy:.0f} microseconds and is computed anew in {1e6 * price.compute:.0f}",
                      stacklevel=2)
        return None
    lane = StreamLane(device) if device.type == "cuda" else InlineLane()
    return HostTier(Offload(HostPool(num_blocks), price.copies_per_step), BlockMover(transfer, lane), price)
