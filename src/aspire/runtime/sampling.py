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


def integers_of(params: SamplingParams, seed: int) -> tuple[int, int]:
    return max(0, params.top_k), seed_bits(seed)


def fractions_of(params: SamplingParams) -> tuple[float, float, float]:
    return params.temperature, params.top_p, params.min_p


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

    def admit(self, slot: int, params: SamplingParams) -> None:
        """The host's part: the slot now belongs to a request that asks for that."""
        self._modes[slot] = mode_of(params)
        self._showing.discard(slot)
        if params.logprobs is not None:
            self._showing.add(slot)

    def store(self, slots: Tensor, integers: Tensor, fractions: Tensor) -> None:
        """The device's part: slots int64 [A] take the values of `integers_of`, int64 [2, A], and of `fractions_of`,
        float64 [3, A]."""
        for table, values in zip((self.top_k, self.seed), integers, strict=True):
            table.index_copy_(0, slots, values.to(table.dtype))
        for table, values in zip((self.temperature, self.top_p, self.min_p), fractions, strict=True):
            table.index_copy_(0, slots, values.to(table.dtype))

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
