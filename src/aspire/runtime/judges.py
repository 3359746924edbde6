"""How logits become picks and verdicts: shared noise (exact tokens) or rejection sampling (exact distribution)."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aspire.ops.judge.reference import judge_rejection
from aspire.ops.sample.reference import probabilities, sample
from aspire.ops.sample.rows import STREAM_DRAFT, Picks, SamplingRows
from aspire.runtime.batch import StepInputs
from aspire.runtime.cache import SlotState
from aspire.runtime.operators import Operators
from aspire.runtime.sampling import Mode, SlotSampling


@dataclass(frozen=True, slots=True)
class Outcome:
    """picks: int64 [R, K + 1], of which num_accepted + 1 are emitted by rows that emit. margin: of the first pick; NaN
    when some of the row's logits are not numbers."""

    picks: Tensor
    num_accepted: Tensor  # int64 [R]
    margin: Tensor  # float32 [R]


class Judge(Protocol):
    """logits: float32 [N, V] after penalties and masks; position: int64 [N] of the token each row chooses."""

    def decide(self, logits: Tensor, position: Tensor, inputs: StepInputs, mode: Mode) -> Outcome: ...


def _num_verified(inputs: StepInputs) -> Tensor:
    """Drafts that each row verifies, int64 [R]: none for prefill and sparse rows."""
    return torch.where((inputs.decode == 1) & (inputs.sparse == 0), inputs.num_drafted, 0)


class SharedNoiseJudge:
    """A draft is accepted iff the target, with the same noise, picks it too; every emitted token is the target's."""

    def __init__(self, state: SlotState, sampling: SlotSampling, operators: Operators) -> None:
        self.state = state
        self.sampling = sampling
        self.operators = operators

    def decide(self, logits: Tensor, position: Tensor, inputs: StepInputs, mode: Mode) -> Outcome:
        chosen = self.operators.sample(logits, self.sampling.rows(inputs.slot[inputs.pick_row], position, mode))
        picks = chosen.token[inputs.pick_index]  # [R, K + 1]
        drafts = self.state.tokens[inputs.slot, 1:]  # [R, K]
        accepted = self.operators.judge(picks, drafts, _num_verified(inputs)).long()
        margins = chosen.margin[inputs.pick_index]  # [R, K + 1]
        return Outcome(picks, accepted, torch.where(margins.isnan().any(1), torch.nan, margins[:, 0]))


class RejectionJudge:
    """Speculative sampling with the draft distributions stored per slot: float32 [S + 1, K, V]."""

    def __init__(self, state: SlotState, sampling: SlotSampling, *, vocab_size: int) -> None:
        self.state = state
        self.sampling = sampling
        slots, width = state.tokens.shape
        self.draft_probs = torch.zeros(slots, width - 1, vocab_size, device=state.tokens.device)

    def decide(self, logits: Tensor, position: Tensor, inputs: StepInputs, mode: Mode) -> Outcome:
        slot = inputs.slot
        drafting = (inputs.sparse == 1) & (inputs.emits == 0)  # [R]
        first = inputs.pick_index[:, 0]
        drafted = self._draft(logits[first], slot, position[first], inputs, mode)
        flat = inputs.pick_index.flatten()  # [R * (K + 1)]
        width = inputs.pick_index.shape[1]
        rows = self.sampling.rows(slot.repeat_interleave(width), position[flat], mode)
        verdict = judge_rejection(logits[flat].view(len(slot), width, -1), rows, self.state.tokens[slot, 1:],
                                  self.draft_probs[slot], _num_verified(inputs))
        picks = verdict.tokens.clone()
        picks[:, 0] = torch.where(drafting, drafted.token, picks[:, 0])
        return Outcome(picks, verdict.num_accepted.long(), drafted.margin)

    def _draft(self, logits: Tensor, slot: Tensor, position: Tensor, inputs: StepInputs, mode: Mode) -> Picks:
        """Drafting rows: pick with the draft's own noise and keep the distribution. logits: [R, V] -> picks [R]."""
        rows: SamplingRows = self.sampling.rows(slot, position, mode, STREAM_DRAFT)
        drafting = (inputs.sparse == 1) & (inputs.emits == 0)
        where = torch.where(drafting, slot, self.state.scratch)
        if self.draft_probs.shape[1]:
            column = torch.where(drafting, inputs.num_drafted, 0)
            self.draft_probs[where, column] = probabilities(logits, rows)
        return sample(logits, rows)
