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
RESERVE_BYTES = 3 << 30  # activations, logits, probe buffers, graphs, what KV offload gathers in


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


def device_kit(device: torch.device, *, batch_invariant: bool, attention_backend: str = "auto") -> DeviceKit:
    """Torch references on the CPU, Triton on CUDA.

    batch_invariant: GEMMs and attention whose rows do not depend on each other. attention_backend: see
    `choose_attention`, which raises ValueError.
    """
    if device.type == "cpu":
        if attention_backend not in ("auto", "reference"):
            raise ValueError(f"attention_backend on the CPU must be auto or reference, got {attention_backend!r}")
        return DeviceKit(ReferenceAttention(), reference_operators(), ModelOps())
    from aspire.model.ops_triton import triton_ops
    from aspire.runtime.operators import triton_operators

    backend = choose_attention(attention_backend, batch_invariant=batch_invariant)
    if batch_invariant:
        from aspire.ops.linear.triton import Linear

        return DeviceKit(backend, triton_operators(), triton_ops(Linear(device)))
    return DeviceKit(backend, triton_operators(), triton_ops())


def choose_attention(name: str, *, batch_invariant: bool) -> AttentionBackend:
    """The backend on CUDA. ValueError for what does not go together.

    triton: the project's kernels. triton+flash (auto), triton+cudnn: the same, with a library of torch for long prompt
    chunks; a query's bits then depend on where its prompt is cut, hence not with batch_invariant, where auto is triton.
    flashinfer: that package for full rows, where it is installed; no graphs. reference: plain torch, for comparison.
    """
    from aspire.attention.chunked import ChunkedAttention
    from aspire.attention.libraries import CudnnChunks, FlashChunks
    from aspire.attention.triton import TritonAttention
    from aspire.ops.merge_attention.triton import merge_attention
    from aspire.ops.paged_attention.triton import KernelConfig

    if batch_invariant:
        if name not in ("auto", "triton"):
            raise ValueError(f"attention_backend with batch_invariant must be auto or triton, got {name!r}")
        return TritonAttention(KernelConfig(packed_rows=64))
    if name == "reference":
        return ReferenceAttention()
    if name == "triton":
        return TritonAttention()
    if name == "flashinfer":
        from aspire.attention.flashinfer import FlashInferAttention, load_flashinfer

        return FlashInferAttention(TritonAttention(), load_flashinfer())
    return ChunkedAttention(TritonAttention, CudnnChunks(merge_attention) if name == "triton+cudnn" else FlashChunks())


def check_kv_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError where the kernels cannot convert to the cache's type."""
    if device.type == "cuda" and dtype.itemsize == 1 and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"kv_cache_dtype must be auto, float16 or bfloat16 on {device_name(device)} (8-bit floats "
                         f"need compute capability 8.9), got {dtype}")


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


