"""Runner: executes StepPlans on one device. A step is build, forward, judge, settle; `launch` does not wait for it.

Hot file: nothing per request belongs here beyond the admission of a slot; per-step work is per batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from aspire.ops.locate.values import Located
from aspire.request import Request
from aspire.runtime.attend import LayerSetup, StepAttention
from aspire.runtime.batch import Batch, BatchBuilder
from aspire.runtime.cache import SlotState
from aspire.runtime.grammars import Grammars
from aspire.runtime.graphs import Buckets, StepGraphs
from aspire.runtime.judges import Judge, Outcome
from aspire.runtime.offload import BlockMover
from aspire.runtime.sampling import Mode, SlotSampling, fractions_of, integers_of
from aspire.runtime.staging import Staging
from aspire.runtime.step import attention_rows, pick_rows, slot_tables
from aspire.runtime.verdicts import Logprobs, PendingStep, PromptLogprobs, num_picks, to_host
from aspire.sampling.logprobs import token_logprobs
from aspire.sampling.pipeline import LogitsPipeline
from aspire.schedule.plan import StepPlan
from aspire.schedule.scheduler import Scheduler


class Model(Protocol):
    """What the runner needs of a decoder: hidden states of tokens [T], logits of chosen hidden states [N]."""

    def forward(self, tokens: Tensor, positions: Tensor,
                attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Wants:
    """What the host knows of a step besides its plan. slots: of the rows that sample. adjusts: some slot has
    penalties, biases or bans. num_top: per pick, how many top logprobs to show, -1 for none; empty: nobody asks."""

    slots: tuple[int, ...]
    mode: Mode
    adjusts: bool
    bitmask: Tensor | None
    num_top: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the sampler alone chooses the tokens."""
        return not self.adjusts and self.bitmask is None and not self.num_top


class Runner:
    """Owns the device state of all slots. Requests are looked up by id when a slot is admitted."""

    def __init__(self, model: Model, setup: LayerSetup, *, state: SlotState, sampling: SlotSampling,
                 pipeline: LogitsPipeline, grammars: Grammars, judge: Judge, builder: BatchBuilder,
                 mover: BlockMover | None = None) -> None:
        """mover: carries out copies to and from host memory; None: plans have none."""
        self.model = model
        self.setup = setup
        self.state = state
        self.sampling = sampling
        self.tables = slot_tables(state, setup.selection, sampling)
        self.pipeline = pipeline
        self.grammars = grammars
        self.judge = judge
        self.builder = builder
        self.mover = mover
        self.arrivals = Staging(builder.device)
        self.results = Staging(builder.device)
        self.graphs: StepGraphs | None = None

    def plain_step(self, batch: Batch, mode: Mode) -> Outcome:
        """What a graph holds: a step in which the sampler alone chooses."""
        hidden, located = self.forward(batch)
        outcome, _ = self.choose(batch, hidden, located, Wants((), mode, adjusts=False, bitmask=None))
        return outcome

    def use_graphs(self, *, max_rows: int, max_tokens: int, max_kv_len: int) -> StepGraphs:
        """Serve decoding steps from CUDA graphs from now on; nothing is captured yet."""
        sizes = Buckets(self.builder.layout, max_rows=max_rows, max_tokens=max_tokens, max_kv_len=max_kv_len)
        self.graphs = StepGraphs(self.plain_step, self.builder, sizes)
        return self.graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan, requests: Mapping[str, Request]) -> PendingStep:
        """Start a step; its effects on slots and cache are ordered before those of the next launch."""
        self._admit(plan, requests)
        if self.mover is not None:
            self.mover.apply(plan)
        if not plan.rows:
            return PendingStep(plan, None)
        wants = self._wants(plan, requests)
        if self.graphs is not None and wants.is_plain:
            replayed = self.graphs.run(plan, wants.mode)
            if replayed is not None:
                return PendingStep(plan, to_host(replayed, self.results))
        batch = self.builder.build(plan)
        hidden, located = self.forward(batch)
        outcome, logprobs = self.choose(batch, hidden, located, wants)
        return PendingStep(
            plan, to_host(outcome, self.results), logprobs, self._prompt_logprobs(plan, requests, hidden),
            self.grammars.follow if self.grammars.needed_by(plan) else None)

    def must_wait(self, plan: StepPlan) -> bool:
        """Whether the step after this one cannot be launched before this one's verdicts are read."""
        return self.grammars.needed_by(plan)

    def broken(self, plan: StepPlan) -> tuple[str, ...]:
        """Requests of the plan whose committed output does not fit their grammar."""
        if not self.grammars.needed_by(plan):
            return ()
        return tuple(row.request_id for row in plan.rows if self.grammars.is_broken(row.slot))

    @torch.inference_mode()
    def add_free_drafts(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Extend the drafts of requests whose grammar allows a single token next, as far as it does."""
        limit = self.state.tokens.shape[1] - 1
        if not limit or not self.grammars.needed_by(plan):
            return
        drafted = {request.request_id: request.num_drafted for request in scheduler.running}
        for row in plan.rows:
            forced = self.grammars.forced(row.slot, limit) if row.request_id in drafted else ()
            before = drafted.get(row.request_id, 0)
            count = scheduler.add_free_drafts(row.request_id, len(forced)) if forced else 0
            if count:
                self.state.tokens[row.slot, before + 1 : before + count + 1] = torch.tensor(
                    forced[:count], device=self.state.tokens.device)
                self.grammars.add_drafts(row.slot, forced[:count])

    def forward(self, batch: Batch) -> tuple[Tensor, Located]:
        """Block tables, tails, the layers: hidden states [T, hidden] of the batch."""
        located = self.setup.operators.locate(batch.inputs, self.tables)
        attend = StepAttention(self.setup, attention_rows(batch, located, self.tables), located)
        hidden = self.model.forward(located.tokens, located.positions, attend)
        attend.finish()
        return hidden, located

    def choose(self, batch: Batch, hidden: Tensor, located: Located, wants: Wants) -> tuple[Outcome, Logprobs | None]:
        """Logits, adjustments, picks, verdicts, and what they change in the slots' state."""
        inputs, state = batch.inputs, self.state
        if not batch.shape.picks:
            nothing = torch.zeros(len(inputs.slot), state.tokens.shape[1] + 2, dtype=torch.int32, device=hidden.device)
            return Outcome(nothing), None
        raw = self.model.logits(hidden.index_select(0, inputs.pick_token))  # float32 [N, V]
        rows = replace(located.picks, mode=wants.mode)
        logits = raw
        if wants.adjusts or wants.bitmask is not None:
            logits = self.pipeline.apply(raw, pick_rows(inputs, state, rows.position), wants.slots, wants.bitmask)
        outcome = self.judge.decide(logits, rows, inputs)
        if wants.adjusts:
            emitted = torch.where(inputs.emits == 1, outcome.num_accepted + 1, 0)
            slot = torch.where(inputs.emits == 1, inputs.slot, state.scratch).long()
            self.pipeline.commit(slot, outcome.picks, emitted, wants.slots)
        self.setup.operators.settle(inputs, self.tables, outcome.packed)
        if not wants.num_top:
            return outcome, None
        place = torch.where(inputs.sparse[inputs.pick_row] == 1, 0, pick_rows(inputs, state, rows.position).num_before)
        token = outcome.picks[inputs.pick_row, place]
        return outcome, Logprobs(token_logprobs(raw, token, max(0, *wants.num_top)), wants.num_top)

    def _admit(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        if not plan.admissions:
            return
        admitted = [requests[admission.request_id] for admission in plan.admissions]
        for admission, request in zip(plan.admissions, admitted, strict=True):
            self.sampling.admit(admission.slot, request.params)
            self.pipeline.admit(admission.slot, request)
            self.grammars.admit(admission.slot, request)
        integers = np.array([(admission.slot, admission.num_known, *integers_of(request.params, request.seed))
                             for admission, request in zip(plan.admissions, admitted, strict=True)], dtype=np.int64)
        fractions = np.array([fractions_of(request.params) for request in admitted], dtype=np.float64)
        values = np.concatenate([integers.T, fractions.T.view(np.int64)])  # [7, A]
        host = self.arrivals.claim(values.size, torch.int64).view(values.shape)
        host.numpy()[:] = values
        packed = self.arrivals.copy(host)
        self.state.admit(packed[0], packed[1])
        self.sampling.store(packed[0], packed[2:4], packed[4:].view(torch.float64))

    def _wants(self, plan: StepPlan, requests: Mapping[str, Request]) -> Wants:
        slots = tuple([row.slot for row in plan.rows if row.samples])
        num_top = self._num_top(plan, requests) if self.sampling.shows(slots) else ()
        return Wants(slots, self.sampling.mode(slots), self.pipeline.needed(slots), self._bitmask(plan, slots), num_top)

    def _num_top(self, plan: StepPlan, requests: Mapping[str, Request]) -> tuple[int, ...]:
        tops = [requests[row.request_id].params.logprobs if row.request_id in requests else None for row in plan.rows]
        return tuple(-1 if top is None else top for row, top in zip(plan.rows, tops, strict=True)
                     for _ in range(num_picks(row)))

    def _bitmask(self, plan: StepPlan, slots: Sequence[int]) -> Tensor | None:
        if not self.grammars.needed(slots):
            return None
        mask = self.grammars.bitmask(plan)
        return None if mask is None else mask.to(self.state.tokens.device)

    def _prompt_logprobs(self, plan: StepPlan, requests: Mapping[str, Request],
                         hidden: Tensor) -> dict[str, PromptLogprobs]:
        found: dict[str, PromptLogprobs] = {}
        first = 0
        for row in plan.rows:
            request = requests.get(row.request_id)
            top = None if request is None or not row.tokens else request.params.prompt_logprobs
            if request is not None and top is not None and not request.output_token_ids:
                stop = min(row.start + row.num_tokens, request.num_prompt - 1)
                target = torch.tensor(request.prompt_token_ids[row.start + 1 : stop + 1], device=hidden.device)
                logits = self.model.logits(hidden[first : first + len(target)])
                found[row.request_id] = PromptLogprobs(token_logprobs(logits, target.long(), top), top, row.start == 0)
            first += row.num_tokens
        return found
