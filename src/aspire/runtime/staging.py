"""Host memory that copies to and from the device go through: page-locked, and used over again.

Locking pages costs far more than a step's copy, so the buffers are made once and taken in turn.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IN_FLIGHT = 2  # steps launched whose verdicts are not read, at most


@dataclass(slots=True)
class _Buffer:
    memory: Tensor  # uint8, page-locked
    copied: torch.cuda.Event  # after the last copy from or to it


class Staging:
    """Buffers taken in turn. On the CPU nothing is copied asynchronously: each claim is fresh memory.

    claim(), then copy() or mark(): a buffer comes around again after IN_FLIGHT others, and not before the copy that
    used it last has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer | None] = [None] * (IN_FLIGHT + 1)
        self._turn = 0

    def claim(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory for `size` numbers, of no particular content."""
        if self._device.type != "cuda":
            return torch.empty(size, dtype=dtype)
        num_bytes = size * dtype.itemsize
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer is not None:
            buffer.copied.synchronize()  # has passed long ago, unless the caller runs ahead of the device
        if buffer is None or len(buffer.memory) < num_bytes:
            grown = max(num_bytes, 0 if buffer is None else 2 * len(buffer.memory))
            buffer = _Buffer(torch.empty(grown, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            self._buffers[self._turn] = buffer
        return buffer.memory[:num_bytes].view(dtype)

    def mark(self) -> torch.cuda.Event | None:
        """A copy with the buffer claimed last was given to the device: an event after it; None on the CPU."""
        buffer = self._buffers[self._turn]
        if buffer is None:
            return None
        buffer.copied.record()
        return buffer.copied

    def copy(self, host: Tensor) -> Tensor:
        """The buffer claimed last on the device, without waiting."""
        if self._device.type != "cuda":
            return host
        packed = host.to(self._device, non_blocking=True)
        self.mark()
        return packed
