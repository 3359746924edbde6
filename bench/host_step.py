"""Host time of one decoding step, by part; prints one JSON line per batch size.

    python bench/host_step.py [--requests 16,64,128] [--context 7900] [--acceptance 0.96] [--steps 400]

A whole engine around no model: scheduler, cadence, batch builder, verdicts, commit, observers and pricing are real,
the device is a coin that answers at once, and the copies to and from it are left out. Times are CPU time of the one
thread, so that a busy machine does not count; medians over steps in which every request decodes. Steps cost, to the
cadence and the pricing, what a cost model of an H200 says.
"""

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aspire.bench.replay import PretendCached
from aspire.build import assemble
from aspire.config import EngineConfig, EngineOptions
from aspire.engine import Engine
from aspire.loop import Done, OverlappedLoop, Pending
from aspire.model.spec import LayerSpec, ModelSpec
from aspire.ops.judge.reference import pack_verdicts
from aspire.pricing import Pricing
from aspire.request import Request, SamplingParams
from aspire.runtime.batch import Arrays, BatchBuilder, Packing
from aspire.runtime.graphs import Bucket, Buckets
from aspire.runtime.judges import Outcome
from aspire.runtime.runner import Runner
from aspire.runtime.sampling import Mode
from aspire.schedule.plan import RowKind, StepPlan, Verdict
from aspire.schedule.scheduler import Scheduler
from aspire.speculation.cadence import Cadence, Decision, Drafting, Outlook
from aspire.speculation.cost import CostModel, kv_shape
from aspire.speculation.online_fit import OnlineFit
from aspire.speculation.policy import resolve_policy

VOCAB = 49152
NUM_LAYERS = 30
BYTES_PER_TOKEN = 2 * 3 * 64 * 2  # of a layer of SmolLM2-135M
NEW_TOKENS = 1000000  # nobody ends while measured
INSIDE = ("plan", "decide", "collect", "pack", "launch", "verdicts", "commit", "coin")  # of Engine.advance
PARTS = ("plan", "decide", "collect", "pack", "launch", "verdicts", "commit", "report", "pricing")


class Stopwatch:
    """Seconds of the running step, by part; a part's time is taken from the part around it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def time(self, part: str, within: str | None, call: Callable[[], Any]) -> Any:
        begun = time.thread_time()
        result = call()
        spent = time.thread_time() - begun
        self.seconds[part] += spent
        if within is not None:
            self.seconds[within] -= spent
        return result


class TimedCadence:
    def __init__(self, cadence: Cadence, watch: Stopwatch) -> None:
        self._cadence = cadence
        self._watch = watch

    @property
    def draft_limit(self) -> int:
        return self._cadence.draft_limit

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        decisions: list[Decision] = self._watch.time(
            "decide", "plan", lambda: self._cadence.decide(requests, outlook))
        return decisions


class TimedPricing(Pricing):
    def __init__(self, scheduler: Scheduler, fit: OnlineFit, watch: Stopwatch) -> None:
        super().__init__(scheduler, fit)
        self._watch = watch

    def observe(self, plan: StepPlan, seconds: float) -> None:
        self._watch.time("pricing", "report", lambda: super(TimedPricing, self).observe(plan, seconds))


class TimedLoop(OverlappedLoop):
    """The overlapped loop's order with a stopwatch around its parts."""

    def __init__(self, scheduler: Scheduler, runner: Runner, watch: Stopwatch, clock: "StepClock") -> None:
        super().__init__(scheduler, runner)
        self._watch = watch
        self._clock = clock

    def advance(self, requests: Mapping[str, Request]) -> Done | None:
        timed, scheduler, runner = self._watch.time, self.scheduler, self.runner
        if self._in_flight is not None:
            timed("launch", None, lambda: runner.must_wait(self._in_flight.plan))  # type: ignore[union-attr]
        plan: StepPlan = timed("plan", None, scheduler.plan)
        step: Pending = timed("launch", None, lambda: runner.launch(plan, requests))
        before, self._in_flight = self._in_flight, step
        timed("coin", None, lambda: self._clock.run(plan))
        if before is None:
            return None
        verdicts: list[Verdict] = timed("verdicts", None, before.verdicts)
        ended: list[Request] = timed("commit", None, lambda: scheduler.commit(before.plan, verdicts))
        timed("launch", None, lambda: runner.add_free_drafts(before.plan, scheduler))
        return Done(before.plan, verdicts, ended, timed("launch", None, lambda: runner.broken(before.plan)))


class StepClock:
    """Tells the time as if steps took what a cost model says."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._now = 0.0

    def run(self, plan: StepPlan) -> None:
        self._now += self._cost.step_seconds(plan.num_tokens, self._cost.kv.plan_bytes(plan))

    def __call__(self) -> float:
        return self._now


class CoinGraphs:
    """Does what StepGraphs does on the host, and draws the outcome instead of replaying a graph."""

    def __init__(self, builder: BatchBuilder, watch: Stopwatch, *, num_rows: int, acceptance: float) -> None:
        self._builder = builder
        self._watch = watch
        self._sizes = Buckets(builder.layout, max_rows=num_rows, max_tokens=max(512, num_rows), max_kv_len=1 << 15)
        self._packings: dict[Bucket, Packing] = {}
        self._acceptance = acceptance
        self._random = np.random.default_rng(0)

    def run(self, plan: StepPlan, mode: Mode) -> Outcome:
        if self._sizes.fits(plan):
            arrays, shape = self._watch.time("collect", "launch", lambda: self._builder.collect(plan))
            bucket = self._sizes.smallest(shape, mode)
            packing = self._packings.get(bucket) or self._builder.packing(self._sizes.shape(bucket))
            self._packings[bucket] = packing
            self._watch.time("pack", "launch", lambda: self._pack(packing, arrays))
        return self._watch.time("coin", "launch", lambda: self._draw(plan))  # type: ignore[no-any-return]

    def _pack(self, packing: Packing, arrays: Arrays) -> None:
        host = self._builder.staging.claim(len(packing.padding), torch.int32)
        packing.fill(host.numpy(), arrays)

    def _draw(self, plan: StepPlan) -> Outcome:
        rows, width = len(plan.rows), self._builder.layout.draft_limit + 1
        picks = torch.from_numpy(self._random.integers(0, VOCAB, (rows, width)))
        accepted = torch.zeros(rows, dtype=torch.int64)
        lucky = (self._random.random((rows, width)) < self._acceptance).cumprod(axis=1).sum(axis=1)
        for index, row in enumerate(plan.rows):
            if row.kind is RowKind.FULL:
                accepted[index] = min(row.num_drafted, int(lucky[index]))
        margin: Tensor = torch.from_numpy(self._random.exponential(2.0, rows).astype(np.float32))
        return Outcome(pack_verdicts(picks, accepted, margin))


class NoModel:
    """Nobody asks it."""

    def forward(self, *unused: object) -> Tensor:
        raise AssertionError("no step runs without a graph here")

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("no step runs without a graph here")


def make_spec(max_model_len: int) -> ModelSpec:
    """SmolLM2's layers with tiny heads, since the cache holds nothing."""
    return ModelSpec("LlamaForCausalLM", vocab_size=VOCAB, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=2,
                     intermediate_size=8, layers=(LayerSpec(),) * NUM_LAYERS, ropes=(), norm_eps=1e-5,
                     max_model_len=max_model_len, attention_scale=1.0)


def make_engine(policy_name: str, num_requests: int, context: int, acceptance: float, watch: Stopwatch) -> Engine:
    policy = resolve_policy(policy_name, NUM_LAYERS)
    timed = replace(policy, cadence=TimedCadence(policy.cadence, watch))
    limit = 1 << 15
    options: EngineOptions = {"max_num_seqs": num_requests, "max_num_batched_tokens": 8192, "loop": "overlapped",
                              "enable_prefix_caching": False, "max_model_len": limit,
                              "num_blocks": num_requests * limit // 16}
    config = EngineConfig.from_options("none", options).resolve(device="cpu", model_dtype="float32", model_limit=limit)
    engine = assemble(config, make_spec(limit), NoModel(), None, device=torch.device("cpu"), pool_type=PretendCached,
                      policy=timed)
    scheduler, runner = engine.scheduler, engine.loop.runner
    assert isinstance(runner, Runner), "assemble made it"
    coin: Any = CoinGraphs(runner.builder, watch, num_rows=num_requests, acceptance=acceptance)
    runner.graphs = coin
    cost = CostModel(3e-4, 9e-4, 5e-6, 1 / 4.0e12, kv_shape(policy.layers, policy.selection, BYTES_PER_TOKEN))
    scheduler.cost = cost
    clock = StepClock(cost)
    return Engine(config, engine.facts, scheduler, TimedLoop(scheduler, runner, watch, clock),
                  pricing=TimedPricing(scheduler, OnlineFit(cost), watch), clock=clock)


def measure(policy: str, num_requests: int, context: int, acceptance: float, num_steps: int) -> dict[str, float]:
    """Median milliseconds of a step by part, and of their sum."""
    watch = Stopwatch()
    engine = make_engine(policy, num_requests, context, acceptance, watch)
    for index in range(num_requests):
        engine.add(str(index), [index % VOCAB] * context, SamplingParams(
            max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, seed=index, temperature=0.8))
    steps: list[dict[str, float]] = []
    gc.disable()
    for _ in range(num_steps + 60):
        watch.seconds.clear()
        watch.time("report", None, engine.advance)
        watch.seconds["report"] -= sum(watch.seconds[part] for part in INSIDE)
        steps.append({part: 1e3 * watch.seconds[part] for part in PARTS})
    gc.enable()
    measured = steps[60:]
    result = {part: round(statistics.median(step[part] for step in measured), 4) for part in PARTS}
    totals = [sum(step.values()) for step in measured]
    return {**result, "total": round(statistics.median(totals), 4),
            "without_decide": round(statistics.median(
                total - step["decide"] for total, step in zip(totals, measured, strict=True)), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="aspire")
    parser.add_argument("--requests", default="16,64,128")
    parser.add_argument("--context", type=int, default=7900)
    parser.add_argument("--acceptance", type=float, default=0.96)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    for num_requests in map(int, args.requests.split(",")):
        result = measure(args.policy, num_requests, args.context, args.acceptance, args.steps)
        print(json.dumps({"bench": "host_step", "policy": args.policy, "requests": num_requests, **result}))


if __name__ == "__main__":
    main()
