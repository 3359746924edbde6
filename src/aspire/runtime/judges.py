"""How logits become picks and verdicts: shared noise (exact tokens) or rejection sampling (exact distribution)."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aspire.ops.judge.reference import judge_rejection, num_verified, pack_verdicts
from aspire.ops.locate.values import StepInputs
from aspire.ops.sample.reference import probabilities, sample
from aspire.ops.sample.rows import STREAM_DRAFT, Picks, SamplingRows
from aspire.runtime.cache import SlotState
from aspire.runtime.operators import Operators
from aspire.runtime.sampling import Mode, SlotSampling


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's verdicts, int32 [R, K + 3]: see ops.judge."""

    packed: Tensor

    @property
    def picks(self) -> Tensor:
        """int64 [R, K + 1], of which num_accepted + 1 are emitted by rows that emit."""
        return self.packed[:, :-2].long()

    @property
    def num_accepted(self) -> Tensor:
        """int64 [R]."""
        return self.packed[:, -2].long()

    @property
    def margin(self) -> Tensor:
        """float32 [R], of the first pick; NaN when some of the row's logits are not numbers."""
        return self.packed[:, -1].view(torch.float32)

    def accepting(self, num_accepted: Tensor) -> "Outcome":
        """The same picks with another verdict, int [R]."""
        return Outcome(pack_verdicts(self.picks, num_accepted, self.margin))


class Judge(Protocol):
    """logits: float32 [N, V] after penalties and masks; rows: sampling values of the N picks."""

    def decide(self, logits: Tensor, rows: SamplingRows, inputs: StepInputs) -> Outcome: ...


class SharedNoiseJudge:
    """A draft is accepted iff the target, with the same noise, picks it too; every emitted token is the target's."""

    def __init__(self, state: SlotState, sampling: SlotSampling, operators: Operators) -> None:
        self.state = state
        self.sampling = sampling
        self.operators = operators

    def decide(self, logits: Tensor, rows: SamplingRows, inputs: StepInputs) -> Outcome:
        return Outcome(self.operators.judge(self.operators.sample(logits, rows), inputs, self.state.tokens))


class RejectionJudge:
    """Speculative sampling with the draft distributions stored per slot: float32 [S + 1, K, V]."""

    def __init__(self, state: SlotState, sampling: SlotSampling, *, vocab_size: int) -> None:
        self.state = state
        self.sampling = sampling
        slots, width = state.tokens.shape
        self.draft_probs = torch.zeros(slots, width - 1, vocab_size, device=state.tokens.device)

    def decide(self, logits: Tensor, rows: SamplingRows, inputs: StepInputs) -> Outcome:
        slot, position = inputs.slot, rows.position
        drafting = (inputs.sparse == 1) & (inputs.emits == 0)  # [R]
        first = inputs.pick_index[:, 0]
        drafted = self._draft(logits[first], position[first], inputs, rows.mode)
        flat = inputs.pick_index.flatten()  # [R * (K + 1)]
        width = inputs.pick_index.shape[1]
        by_row = self.sampling.rows(slot.repeat_interleave(width), position[flat], rows.mode)
        verdict = judge_rejection(logits[flat].view(len(slot), width, -1), by_row, self.state.tokens[slot, 1:],
                                  self.draft_probs[slot], num_verified(inputs))
        picks = verdict.tokens.clone()
        picks[:, 0] = torch.where(drafting, drafted.token, picks[:, 0])
        return Outcome(pack_verdicts(picks, verdict.num_accepted, drafted.margin))

    def _draft(self, logits: Tensor, position: Tensor, inputs: StepInputs, mode: Mode) -> Picks:
        """Drafting rows: pick with the draft's own noise and keep the distribution. logits: [R, V] -> picks [R]."""
        rows = self.sampling.rows(inputs.slot, position, mode, STREAM_DRAFT)
        drafting = (inputs.sparse == 1) & (inputs.emits == 0)
        where = torch.where(drafting, inputs.slot, self.state.scratch)
        if self.draft_probs.shape[1]:
            column = torch.where(drafting, inputs.num_drafted, 0)
            self.draft_probs[where, column] = probabilities(logits, rows)
        return sample(logits, rows)
