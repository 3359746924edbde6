"""Per-slot sampling values on the device, and the host's knowledge of how much of the sampler a step needs."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from aspire.ops.sample.rows import STREAM_TARGET, SamplingRows, seed_bits
from aspire.request import SamplingParams

Mode = Literal["greedy", "plain", "filtered"]
_MODES: tuple[Mode, ...] = ("greedy", "plain", "filtered")


def mode_of(params: SamplingParams) -> Mode:
    """How much of the sampler one request needs."""
    if params.temperature == 0:
        return "greedy"
    return "filtered" if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else "plain"


class SlotSampling:
    """Sampling values of every slot, [S + 1] each; the last entry is scratch."""

    def __init__(self, num_slots: int, *, device: torch.device) -> None:
        size = num_slots + 1
        self.temperature = torch.zeros(size, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(size, dtype=torch.int32, device=device)
        self.top_p = torch.ones(size, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(size, dtype=torch.float32, device=device)
        self.seed = torch.zeros(size, dtype=torch.int64, device=device)
        self._modes: list[Mode] = ["greedy"] * size
        self._showing: set[int] = set()  # slots whose requests want log probabilities

    def admit(self, slot: int, params: SamplingParams, seed: int) -> None:
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(0, params.top_k)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = seed_bits(seed)
        self._modes[slot] = mode_of(params)
        self._showing.discard(slot)
        if params.logprobs is not None:
            self._showing.add(slot)

    def shows(self, slots: Sequence[int]) -> bool:
        """Whether a request in one of these slots wants log probabilities."""
        return bool(self._showing) and not self._showing.isdisjoint(slots)

    def mode(self, slots: Sequence[int]) -> Mode:
        """The least mode that covers these slots."""
        return max({self._modes[slot] for slot in slots}, key=_MODES.index, default="greedy")

    def rows(self, slot: Tensor, position: Tensor, mode: Mode, stream: int = STREAM_TARGET) -> SamplingRows:
        """Values of N logits rows. slot: int64 [N]; position: int64 [N], of the token being chosen."""
        return SamplingRows(self.temperature[slot], self.top_k[slot], self.top_p[slot], self.min_p[slot],
                            self.seed[slot], position, mode, stream)
