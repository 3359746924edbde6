"""What differs by device: operators, attention backend, the model's fused operations, and memory for the KV pool."""

import os
import platform
from dataclasses import dataclass

import torch

from aspire.attention.protocol import AttentionBackend
from aspire.attention.reference import ReferenceAttention
from aspire.model.layers import ModelOps
from aspire.runtime.cache import KVShape
from aspire.runtime.operators import Operators, reference_operators

CPU_POOL_BYTES = 4 << 30
RESERVE_BYTES = 3 << 30  # activations, logits, probe buffers and graphs of a CUDA engine


@dataclass(frozen=True, slots=True)
class DeviceKit:
    """The implementations an engine on one device uses."""

    backend: AttentionBackend
    operators: Operators
    model_ops: ModelOps


def choose_device(name: str) -> torch.device:
    """Raises ValueError for a device that is unknown or not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be available on this machine: torch sees no CUDA device, got 'cuda'")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """The card's name; of the CPU its architecture and number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()} {os.cpu_count()} cores"


def device_kit(device: torch.device, *, batch_invariant: bool) -> DeviceKit:
    """Torch references on the CPU, Triton on CUDA, with a library's attention for long prompt chunks.

    batch_invariant: GEMMs and attention whose rows do not depend on each other, nor on where a prompt is cut: that
    leaves the library out.
    """
    if device.type == "cpu":
        return DeviceKit(ReferenceAttention(), reference_operators(), ModelOps())
    from aspire.attention.chunked import ChunkedAttention
    from aspire.attention.libraries import FlashChunks
    from aspire.attention.triton import TritonAttention
    from aspire.model.ops_triton import triton_ops
    from aspire.ops.paged_attention.triton import KernelConfig
    from aspire.runtime.operators import triton_operators

    if batch_invariant:
        from aspire.ops.linear.triton import Linear

        return DeviceKit(TritonAttention(KernelConfig(packed_rows=64)), triton_operators(), triton_ops(Linear(device)))
    return DeviceKit(ChunkedAttention(TritonAttention, FlashChunks()), triton_operators(), triton_ops())


def pool_blocks(shape: KVShape, dtype: torch.dtype, *, wanted: int, device: torch.device, utilization: float) -> int:
    """Blocks of the KV pool: as many as all slots can use, up to what memory allows.

    CUDA: `utilization` of the card's memory, less what is in use and a reserve. ValueError when nothing is left.
    """
    block = shape.bytes_per_block(dtype)
    if device.type == "cpu":
        return min(wanted, max(1, CPU_POOL_BYTES // block))
    free, total = torch.cuda.mem_get_info(device)
    room = int(utilization * total) - (total - free) - RESERVE_BYTES
    if room < block:
        raise ValueError(f"gpu_memory_utilization must leave room for a KV cache: {utilization} of {total >> 20} MiB, "
                         f"less {total - free >> 20} MiB in use and {RESERVE_BYTES >> 20} MiB reserved, is less than "
                         f"one block of {block} bytes")
    return min(wanted, room // block)


