"""Runner: executes StepPlans on one device. A step is build, forward, judge, settle; `launch` does not wait for it.

Hot file: nothing per request belongs here beyond the admission of a slot; per-step work is per batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aspire.request import Request
from aspire.runtime.attend import LayerSetup, StepAttention
from aspire.runtime.batch import Batch, BatchBuilder
from aspire.runtime.cache import SlotState
from aspire.runtime.judges import Judge, Outcome
from aspire.runtime.sampling import Mode, SlotSampling
from aspire.runtime.step import locate, settle
from aspire.schedule.plan import StepPlan, Verdict


class Model(Protocol):
    """What the runner needs of a decoder: hidden states of tokens [T], logits of chosen hidden states [N]."""

    def forward(self, tokens: Tensor, positions: Tensor,
                attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step; `verdicts` waits for it."""

    plan: StepPlan
    outcome: Outcome | None

    def verdicts(self) -> list[Verdict]:
        """One verdict per row of the plan, in order."""
        if self.outcome is None:
            return []
        accepted = self.outcome.num_accepted.tolist()
        picks = self.outcome.picks.tolist()
        margins = self.outcome.margin.tolist()
        return [
            Verdict(row.request_id, tuple(picks[i][: accepted[i] + 1]), 0 if row.tokens else row.num_drafted)
            if row.samples and row.emits
            else Verdict(row.request_id, draft_margin=margins[i] if row.samples else None)
            for i, row in enumerate(self.plan.rows)
        ]


class Runner:
    """Owns the device state of all slots. Requests are looked up by id when a slot is admitted."""

    def __init__(self, model: Model, setup: LayerSetup, *, state: SlotState, sampling: SlotSampling, judge: Judge,
                 builder: BatchBuilder) -> None:
        self.model = model
        self.setup = setup
        self.state = state
        self.sampling = sampling
        self.judge = judge
        self.builder = builder

    @torch.inference_mode()
    def launch(self, plan: StepPlan, requests: Mapping[str, Request]) -> PendingStep:
        """Start a step; its effects on slots and cache are ordered before those of the next launch."""
        for admission in plan.admissions:
            request = requests[admission.request_id]
            self.state.admit(admission.slot, admission.num_known)
            self.setup.selection.clear(admission.slot)
            self.sampling.admit(admission.slot, request.params, request.seed)
        if not plan.rows:
            return PendingStep(plan, None)
        batch = self.builder.build(plan)
        mode = self.sampling.mode([row.slot for row in plan.rows if row.samples])
        return PendingStep(plan, self._step(batch, mode))

    def _step(self, batch: Batch, mode: Mode) -> Outcome:
        inputs, state = batch.inputs, self.state
        state.block_table.view(-1)[inputs.update_index] = inputs.update_block.int()
        located = locate(inputs, batch.shape, state, self.setup.selection.tail_start)
        emitting_slot = torch.where(inputs.emits == 1, inputs.slot, state.scratch)
        self.setup.selection.anchor(emitting_slot, torch.where(inputs.emits == 1, located.context, 0))

        attend = StepAttention(self.setup, inputs, batch.shape, located, scratch=state.scratch)
        hidden = self.model.forward(located.tokens, located.positions, attend)
        attend.finish()
        if not batch.shape.picks:
            return Outcome(torch.zeros_like(inputs.pick_index), torch.zeros_like(inputs.slot),
                           torch.zeros(len(inputs.slot), device=hidden.device))
        logits = self.model.logits(hidden[inputs.pick_token])
        outcome = self.judge.decide(logits, located.positions[inputs.pick_token] + 1, inputs, mode)
        settle(inputs, state, outcome.picks, outcome.num_accepted)
        return outcome
