"""Engine: requests in, outputs out, around a step loop (loop.py) over a scheduler and a runner.

Knows nothing of servers, threads or progress bars; observers see one StepStats per step.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aspire.config import EngineConfig
from aspire.engine_stats import EngineStats
from aspire.loop import Done, OverlappedLoop, PlainLoop
from aspire.outputs import RequestGroup
from aspire.pricing import Pricing
from aspire.request import Request, RequestOutput, SamplingParams
from aspire.schedule.plan import Direction
from aspire.schedule.scheduler import Scheduler
from aspire.stats import Observer, StepStats, row_stats
from aspire.text import OutputText, TokenDecoder
from aspire.totals import Totals

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What request checks and outputs need to know of the model. tokenizer: None when it has none.
    default_params: the model's own generation defaults."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Any
    default_params: SamplingParams


class Engine:
    """The synchronous engine. Not thread-safe: one caller steps, adds and aborts."""

    def __init__(self, config: EngineConfig, facts: ModelFacts, scheduler: Scheduler,
                 loop: PlainLoop | OverlappedLoop, *, checks: Sequence[Callable[[SamplingParams], None]] = (),
                 pricing: Pricing | None = None, observers: Sequence[Observer] = (),
                 clock: Clock = time.monotonic) -> None:
        """checks: further tests of a request's params, raising ValueError. pricing: learns what steps cost."""
        self.config = config
        self.facts = facts
        self.scheduler = scheduler
        self.loop = loop
        self._checks = tuple(checks)
        self._pricing = pricing
        self.totals = Totals()
        self.observers = [self.totals, *observers]
        self._clock = clock
        self._started = clock()
        self._decoder = None if facts.tokenizer is None else TokenDecoder(facts.tokenizer)
        self._seeds = random.Random(config.model.seed)
        self._groups: dict[str, RequestGroup] = {}  # by user request id
        self._requests: dict[str, Request] = {}  # by sequence id
        self._group_of: dict[str, str] = {}
        self._arrived: list[str] = []
        self._num_steps = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *,
            prompt: str | None = None, priority: int = 0) -> None:
        """Queue a request. Raises ValueError naming field and value; a refused request leaves no trace."""
        sequence_ids = [request_id] if params.n == 1 else [f"{request_id}#{index}" for index in range(params.n)]
        if request_id in self._groups or any(name in self._requests for name in sequence_ids):
            raise ValueError(f"request_id must be unique among unfinished requests, got {request_id!r}")
        self._check(prompt_token_ids, params)
        max_total = self._max_total(len(prompt_token_ids), params)
        base_seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        sequences: list[Request] = []
        texts: list[OutputText] = []
        for index, sequence_id in enumerate(sequence_ids):
            text = OutputText(params, eos_token_ids=self.facts.eos_token_ids, decoder=self._decoder,
                              prompt_token_ids=prompt_token_ids)
            request = Request(sequence_id, prompt_token_ids, params, max_total=max_total, seed=base_seed + index,
                              priority=priority, stop_checker=text, leader=sequences[0] if sequences else None)
            request.counters.arrival_time = self._clock()
            sequences.append(request)
            texts.append(text)
        for request in sequences:  # the first is refused before anything is recorded; its siblings are alike
            self.scheduler.add(request)
            self._requests[request.request_id] = request
            self._group_of[request.request_id] = request_id
            self._arrived.append(request.request_id)
        self._groups[request_id] = RequestGroup(request_id, prompt, sequences, texts)

    def prepare(self, params: SamplingParams) -> None:
        """Do what is slow about a request's parameters (grammars are compiled and kept) ahead of `add`. The one method
        that any thread may call. Raises ValueError."""
        for check in self._checks:
            check(params)

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are free at once. Unknown or finished ids are ignored."""
        group = self._groups.get(request_id)
        if group is not None:
            self._stop(group)
            self._forget(group)

    def _stop(self, group: RequestGroup) -> None:
        for request in group.sequences:
            self._stop_one(request)

    def _stop_one(self, request: Request) -> None:
        if not request.is_finished:
            self.scheduler.abort(request.request_id)
            assert isinstance(request.stop_checker, OutputText), "set by add()"
            request.stop_checker.finish()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups)

    def output(self, request_id: str) -> RequestOutput:
        """The current state of an unfinished request. KeyError for others."""
        return self._groups[request_id].render()

    def stats(self) -> EngineStats:
        """A snapshot for metrics and dashboards."""
        predicted = None if self._pricing is None else self._pricing.predicted
        return replace(self.totals.snapshot(self.scheduler), predicted_step_seconds=predicted)

    @property
    def default_params(self) -> SamplingParams:
        return self.facts.default_params

    @property
    def tokenizer(self) -> Any:
        return self.facts.tokenizer

    @property
    def model_name(self) -> str:
        return self.facts.name

    @property
    def max_model_len(self) -> int:
        return self.facts.max_model_len

    # -- stepping ------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One step; the outputs of the requests that advanced, cumulative."""
        return [group.render() for group in self.advance()]

    def advance(self) -> list[RequestGroup]:
        """One step without rendering: the groups that gained tokens or ended. Ended ones are no longer held."""
        begun = self._clock()
        done = self.loop.advance(self._requests)
        return [] if done is None else self._report(done, begun)

    def _report(self, done: Done, begun: float) -> list[RequestGroup]:
        now = self._clock()
        for request in done.ended:
            self.totals.count_prefix(request)
            assert isinstance(request.stop_checker, OutputText), "set by add()"
            request.stop_checker.finish()
        touched: dict[str, RequestGroup] = {}
        for verdict in done.verdicts:
            if verdict.tokens and (group_id := self._group_of.get(verdict.request_id)) is not None:
                touched[group_id] = self._groups[group_id]
        for request_id in done.broken:  # nothing that the grammar allows was left to pick
            group_id = self._group_of.get(request_id)
            if group_id is not None:
                touched[group_id] = self._groups[group_id]
                self._stop_one(self._requests[request_id])
        for group in touched.values():
            if group.is_finished:
                self._forget(group)
        if self._pricing is not None:
            self._pricing.observe(done.plan, now - begun)
        self._observe(done, begun, now)
        self._num_steps += 1
        return list(touched.values())

    def _observe(self, done: Done, begun: float, now: float) -> None:
        plan = done.plan
        offloaded = sum(copy.direction is Direction.TO_HOST for copy in plan.copies)
        stats = StepStats(
            step=self._num_steps, time=begun - self._started, duration=now - begun,
            rows=row_stats(plan, done.verdicts), tokens=plan.num_tokens, kv_usage=self.scheduler.pool.usage,
            running=self.scheduler.num_running, waiting=self.scheduler.num_waiting, arrived=tuple(self._arrived),
            preempted=plan.preempted, finished=tuple(request.request_id for request in done.ended),
            offloaded=offloaded, restored=len(plan.copies) - offloaded,
        )
        self._arrived.clear()
        for observer in self.observers:
            observer.on_step(stats)

    def _forget(self, group: RequestGroup) -> None:
        del self._groups[group.request_id]
        for request in group.sequences:
            del self._requests[request.request_id], self._group_of[request.request_id]

    def _max_total(self, num_prompt: int, params: SamplingParams) -> int:
        """Prompt plus output at most. Without max_tokens an output ends where the model or the KV cache does."""
        limit = self.facts.max_model_len
        if params.max_tokens is not None:
            return min(limit, num_prompt + params.max_tokens)
        pool = self.scheduler.pool
        return min(limit, max(num_prompt + 1, pool.num_blocks * pool.block_size))

    # -- checks --------------------------------------------------------------------------------------------------

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        limit, vocab = self.facts.max_model_len, self.facts.vocab_size
        if len(prompt) == 0:
            raise ValueError("prompt must hold at least one token, got an empty prompt")
        if len(prompt) >= limit:
            raise ValueError(f"prompt must be shorter than max_model_len ({limit} tokens), got {len(prompt)} tokens")
        for token in prompt:
            if not isinstance(token, int) or not 0 <= token < vocab:
                raise ValueError(f"prompt token ids must be integers in [0, {vocab}), got {token!r}")
        for name, ids in (("stop_token_ids", params.stop_ids), ("logit_bias", params.logit_bias or {})):
            for token in ids:
                if token >= vocab:
                    raise ValueError(f"{name} must hold token ids in [0, {vocab}), got {token}")
        for check in self._checks:
            check(params)
