"""simulate(): one policy on one scenario. The clock is the cost model; everything else is the engine's own code."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from aspire.request import Request, SamplingParams
from aspire.schedule.blocks import BlockPool
from aspire.schedule.config import SchedulerConfig
from aspire.schedule.plan import Row, RowKind, StepPlan, Verdict
from aspire.schedule.scheduler import Scheduler
from aspire.simulate.curves import Curve, accepted
from aspire.speculation.acceptance import AcceptanceEstimator
from aspire.speculation.cadence import Cadence
from aspire.speculation.cost import CostModel, KvShape

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """num_prompt, num_output: tokens. arrival: seconds."""

    num_prompt: int
    num_output: int
    curve: Curve
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """prefill: "free" takes no time, so that decoding alone is studied; "chunked" computes prompts in the mixed forward
    under `max_num_batched_tokens`. horizon: stop after that many timed seconds (None: to the end).
    loop: "overlapped" plans step t + 1 before the commit of step t."""

    name: str
    requests: tuple[SimulatedRequest, ...]
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefill: Literal["free", "chunked"] = "free"
    horizon: float | None = None
    loop: Literal["plain", "overlapped"] = "plain"


@dataclass(slots=True)
class Totals:
    """What a simulation counted. Times in seconds of the simulated clock."""

    seconds: float = 0.0
    steps: int = 0
    emitted: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    row_tokens: int = 0
    kv_bytes: float = 0.0
    steps_past_knee: int = 0
    prediction_error: float = 0.0  # summed |predicted - expected| tokens of verifications with drafts
    predicted: int = 0
    lengths: dict[int, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_verification(self) -> float:
        return (self.accepted + self.verifications) / self.verifications if self.verifications else 0.0

    @property
    def mean_prediction_error(self) -> float:
        return self.prediction_error / self.predicted if self.predicted else 0.0


class KnownRates:
    """The clairvoyant's estimator: knows every request's true curve and where it stands, not its luck."""

    def __init__(self, position_of: Callable[[str], tuple[Curve, int] | None]) -> None:
        self._position_of = position_of
        self._rounds: dict[str, int] = {}

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        self._rounds[request_id] = self._rounds.get(request_id, 1) + 1

    def note_draft(self, request_id: str, position: int, margin: float | None) -> None:
        """Knows the rates already."""

    def survival(self, request_id: str, length: int) -> list[float]:
        place = self._position_of(request_id)
        return [0.9 ** j for j in range(1, length + 1)] if place is None else true_survival(*place, length)

    def confidence(self, request_id: str) -> float:
        return 1.0

    def rounds(self, request_id: str) -> int:
        return self._rounds.get(request_id, 1)

    def forget(self, request_id: str) -> None:
        self._rounds.pop(request_id, None)

    @property
    def mean_rate(self) -> float:
        return 0.9


def true_survival(curve: Curve, position: int, length: int) -> list[float]:
    """The probabilities an estimator tries to learn."""
    result, product = [], 1.0
    for depth in range(1, length + 1):
        product *= curve.rate(position, depth)
        result.append(product)
    return result


class Simulation:
    """One run. `assumed`: the cost model the cadence believes (the true one unless given)."""

    def __init__(self, scenario: Scenario, cadence: Cadence, acceptance: AcceptanceEstimator | None, cost: CostModel, *,
                 assumed: CostModel | None = None) -> None:
        """acceptance None: the clairvoyant's."""
        self.scenario = scenario
        self.cost = cost
        self.totals = Totals()
        self._specs = {f"r{i}": spec for i, spec in enumerate(scenario.requests)}
        self._live: dict[str, Request] = {}
        self.acceptance = acceptance if acceptance is not None else KnownRates(self._place)
        lookahead = (cadence.draft_limit + 1) * (2 if scenario.loop == "overlapped" else 1)
        longest = max(s.num_prompt + s.num_output for s in scenario.requests)
        blocks = sum(-(-(s.num_prompt + s.num_output + lookahead) // BLOCK_SIZE) for s in scenario.requests)
        budget = scenario.max_num_batched_tokens
        if scenario.prefill == "free":
            budget += sum(s.num_prompt for s in scenario.requests)
        config = SchedulerConfig(scenario.max_num_seqs, budget, longest, BLOCK_SIZE, lookahead)
        self.scheduler = Scheduler(config, BlockPool(blocks, BLOCK_SIZE, enable_prefix_caching=False), cadence,
                                   acceptance=self.acceptance, cost=assumed or cost, clock=lambda: self.totals.seconds)

    def run(self) -> Totals:
        arrivals = sorted(self._specs.items(), key=lambda item: item[1].arrival)
        horizon = self.scenario.horizon
        lag = 1 if self.scenario.loop == "overlapped" else 0
        in_flight: list[StepPlan] = []
        while arrivals or self.scheduler.has_unfinished or in_flight:
            while arrivals and (arrivals[0][1].arrival <= self.totals.seconds
                                or not (self.scheduler.has_unfinished or in_flight)):
                name, spec = arrivals.pop(0)
                self.totals.seconds = max(self.totals.seconds, spec.arrival)
                self._add(name, spec)
            if self.scheduler.has_unfinished:
                plan = self.scheduler.plan()
                self._count(plan)
                in_flight.append(plan)
            if len(in_flight) > (lag if self.scheduler.has_unfinished else 0):
                self._commit(in_flight.pop(0))
            if horizon is not None and self.totals.seconds >= horizon:
                break
        return self.totals

    def _add(self, name: str, spec: SimulatedRequest) -> None:
        params = SamplingParams(max_tokens=spec.num_output, ignore_eos=True)
        request = Request(name, [0] * spec.num_prompt, params, max_total=spec.num_prompt + spec.num_output)
        self._live[name] = request
        self.scheduler.add(request)

    def _place(self, name: str) -> tuple[Curve, int] | None:
        request = self._live.get(name)
        return None if request is None else (self._specs[name].curve, len(request.output_token_ids))

    def _count(self, plan: StepPlan) -> None:
        totals = self.totals
        if self.scenario.prefill == "free":
            plan = replace(plan, rows=tuple(row for row in plan.rows if not row.tokens))
        if not plan.rows:
            return
        num_tokens, kv_bytes = plan.num_tokens, self.cost.kv.plan_bytes(plan)
        totals.seconds += self.cost.step_seconds(num_tokens, kv_bytes)
        totals.steps += 1
        totals.row_tokens += num_tokens
        totals.kv_bytes += kv_bytes
        totals.steps_past_knee += num_tokens > self.cost.knee

    def _commit(self, plan: StepPlan) -> None:
        verdicts = [self._judge(row) for row in plan.rows]
        for request in self.scheduler.commit(plan, verdicts):
            del self._live[request.request_id]

    def _judge(self, row: Row) -> Verdict:
        if row.kind is RowKind.SPARSE or not row.samples:
            return Verdict(row.request_id)
        place = self._place(row.request_id)
        if place is None:
            return Verdict(row.request_id, (0,) * (row.num_drafted + 1), row.num_drafted)
        curve, position = place
        num_accepted = accepted(curve, position, row.num_drafted)
        if not row.tokens:
            self._record(row, curve, position, num_accepted)
        return Verdict(row.request_id, (0,) * (num_accepted + 1), row.num_drafted)

    def _record(self, row: Row, curve: Curve, position: int, num_accepted: int) -> None:
        totals, d = self.totals, row.num_drafted
        totals.emitted += num_accepted + 1
        totals.verifications += 1
        totals.drafted += d
        totals.accepted += num_accepted
        totals.lengths[d] = totals.lengths.get(d, 0) + 1
        if d:
            predicted = sum(self.acceptance.survival(row.request_id, d))
            totals.prediction_error += abs(predicted - sum(true_survival(curve, position, d)))
            totals.predicted += 1


@dataclass(frozen=True, slots=True)
class Machine:
    """A device and model as the cost model sees them: base, weights, per_token, per_byte in seconds; layers and bytes
    a token's KV takes in one layer."""

    name: str
    num_layers: int
    bytes_per_token: int
    coefficients: tuple[float, float, float, float]

    def cost(self, kv: KvShape) -> CostModel:
        return CostModel(*self.coefficients, kv)


def mixed_requests(seed: int, count: int, num_output: int, *, contexts: tuple[int, int],
                   make_curve: Callable[[random.Random], Curve]) -> tuple[SimulatedRequest, ...]:
    """Requests with contexts spread evenly in logarithm between the two given ones, and a curve each."""
    rng = random.Random(seed)
    low, high = contexts
    return tuple(SimulatedRequest(round(low * (high / low) ** rng.random()), num_output, make_curve(rng))
                 for _ in range(count))
