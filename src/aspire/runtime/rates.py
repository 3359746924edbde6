"""What this machine does in a second, as far as the price of copies to and from host memory needs it."""

import statistics
import time
from collections.abc import Callable

import torch

from aspire.runtime.offload import Transfer

CPU_COPY_RATE = 3e9  # bytes per second through the buffer; assumed, so that plans on the CPU are the same every time
CPU_MATRIX_RATE = 1e11  # FLOP per second, assumed
PREFILL_SHARE = 0.6  # of the matrix rate that prefill reaches


def copy_seconds(transfer: Transfer) -> float:
    """Of one block from host memory, measured on CUDA."""
    device, count = transfer.device, transfer.capacity
    if device.type != "cuda":
        return transfer.block_bytes / CPU_COPY_RATE
    return _median_seconds(lambda: transfer.fetch(range(count)), device) / count


def compute_seconds(num_parameters: int, tokens: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of `tokens` tokens in a prefill, attention left out, by a matrix product measured on CUDA."""
    rate, size = CPU_MATRIX_RATE, 4096
    if device.type == "cuda":
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        rate = 2.0 * size**3 / _median_seconds(lambda: torch.mm(left, right), device)
    return 2.0 * num_parameters * tokens / (PREFILL_SHARE * rate)


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
