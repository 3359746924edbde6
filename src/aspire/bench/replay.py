"""Stand-ins for real text: prompts taken as computed, drafts accepted by a coin."""

from collections.abc import Container, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aspire.ops.judge.reference import num_verified
from aspire.ops.locate.values import StepInputs
from aspire.ops.sample.noise import noise_words, uniform
from aspire.ops.sample.rows import SamplingRows
from aspire.runtime.judges import Judge, Outcome, SharedNoiseJudge
from aspire.schedule.blocks import Allocation, BlockPool

REPLAY_STREAM = 7
NUM_COINS = 1 << 20
STRIDE = 7919  # between the coins of neighbouring seeds


class PretendCached(BlockPool):
    """A pool that takes every prompt but its last token as computed, once: after a preemption it is honest. No request
    is new to it once `pretends` is off."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.pretends = True
        self._pretended: set[str] = set()

    def allocate(self, request_id: str, token_ids: Sequence[int], num_tokens: int, salt: bytes = b"",
                 elsewhere: Container[bytes] = ()) -> Allocation | None:
        allocation = super().allocate(request_id, token_ids, num_tokens, salt, elsewhere)
        if allocation is None or not self.pretends or request_id in self._pretended:
            return allocation
        self._pretended.add(request_id)
        return replace(allocation, num_cached_tokens=max(0, len(token_ids) - 1))


class ReplayJudge:
    """Accepts drafts by a coin of fixed bias; picks stay the model's. A coin is looked up by seed and position: what
    it costs must not count as part of a step, and requests of one seed share their luck."""

    def __init__(self, judge: Judge, rate: float) -> None:
        assert isinstance(judge, SharedNoiseJudge), "replay works on the shared-noise judge"
        self.judge = judge
        device = judge.state.tokens.device
        index = torch.arange(NUM_COINS, device=device)
        self.accepts = uniform(noise_words(index, index, 1, REPLAY_STREAM)).view(-1) < rate  # bool [NUM_COINS]

    def decide(self, logits: Tensor, rows: SamplingRows, inputs: StepInputs) -> Outcome:
        outcome = self.judge.decide(logits, rows, inputs)
        at = rows.position[inputs.pick_index[:, :-1]]  # [R, K]
        seed = self.judge.sampling.seed[inputs.slot][:, None]
        coin = self.accepts[(seed * STRIDE + at) % NUM_COINS]
        index = torch.arange(at.shape[1], device=at.device)
        passed = coin & (index < num_verified(inputs)[:, None])
        return outcome.accepting(passed.int().cumprod(1).sum(1))
