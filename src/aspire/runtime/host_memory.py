"""Host memory for blocks of the KV cache: how many fit, and memory that the device can copy from and to by itself."""

import os
import weakref

import numpy as np
import torch
from torch import Tensor


def host_blocks(gibibytes: float, block_bytes: int) -> int:
    """Blocks that `kv_offload_gb` holds. ValueError when that is none, or more than the host has free."""
    wanted, free = int(gibibytes * (1 << 30)), free_host_bytes()
    if wanted < block_bytes:
        raise ValueError(f"kv_offload_gb must be 0 or hold at least one block of {block_bytes} bytes "
                         f"({block_bytes / (1 << 30):.2g} GiB), got {gibibytes}")
    if wanted > free:
        raise ValueError(f"kv_offload_gb must be at most {free / (1 << 30):.1f}, the GiB of host memory that are free, "
                         f"got {gibibytes}")
    return wanted // block_bytes


def free_host_bytes() -> int:
    """What can be had without swapping; where the system does not tell, what is not in use."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def host_memory(size: tuple[int, ...], device: torch.device) -> Tensor:
    """uint8 zeros of that size. For a CUDA device the pages are locked, exactly as many as are needed (torch's own
    pinned memory comes in powers of two), until the tensor is gone. ValueError when the system refuses."""
    memory = np.zeros(int(np.prod(size)), dtype=np.uint8)
    tensor = torch.from_numpy(memory).view(size)
    if device.type == "cuda":
        address = memory.ctypes.data
        cudart = torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
        if error:
            raise ValueError(f"kv_offload_gb must be less than the memory that this process may lock, got "
                             f"{memory.nbytes / (1 << 30):.1f} GiB (CUDA error {error})")
        weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return tensor
