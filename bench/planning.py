"""Host time of one Scheduler.plan() and commit() with many decoding requests; prints one JSON line.

    python bench/planning.py [--requests 64] [--context 8192] [--policy scripted|direct|autoregressive]

Requests accept drafts at rates of .80 to .98. "scripted" drafts eight times, then verifies: the price of scheduling
without that of a cadence's thinking.
Exit status 1 when the median plan takes more than --limit-ms.
"""

import argparse
import json
import statistics
import time

from aspire.request import Request, SamplingParams
from aspire.schedule.blocks import BlockPool
from aspire.schedule.config import SchedulerConfig
from aspire.schedule.scheduler import Scheduler
from aspire.simulate.curves import accepted, constant
from aspire.speculation.acceptance import SurvivalEstimator
from aspire.speculation.cadence import Always, Cadence, Decision
from aspire.speculation.cost import CostModel, kv_shape
from aspire.speculation.layers import per_layer_lists
from aspire.speculation.selection import SelectionConfig
from aspire.testing.schedule import ScriptedCadence, ScriptedDevice

DRAFT_LIMIT = 15
BLOCK_SIZE = 16
BATCHED_TOKENS = 8192


def make_cadence(name: str) -> Cadence:
    if name == "autoregressive":
        return Always()
    if name == "direct":
        from aspire.speculation.direct import Direct

        return Direct(DRAFT_LIMIT)
    return ScriptedCadence(DRAFT_LIMIT, (*[Decision.DRAFT] * 8, Decision.VERIFY))


class BlindDevice(ScriptedDevice):
    """Answers without checking what rows read: the check costs a pass over the context."""

    def _read(self, slot: object, stop: int) -> None:
        pass

    def _write(self, slot: object, start: int, stop: int, *, trusted: bool) -> None:
        pass


def make_scheduler(cadence: Cadence, num_requests: int, context: int, max_tokens: int) -> Scheduler:
    lookahead = 2 * (cadence.draft_limit + 1)
    max_total = context + max_tokens
    config = SchedulerConfig(num_requests, BATCHED_TOKENS, max_total, BLOCK_SIZE, lookahead)
    pool = BlockPool(num_requests * -(-max_total // BLOCK_SIZE), BLOCK_SIZE)
    kv = kv_shape(per_layer_lists(32, (8, 16, 24)), SelectionConfig(), 4096)
    cost = CostModel(base=2e-4, weights=4e-3, per_token=2.5e-5, per_byte=1 / 4e12, kv=kv)
    return Scheduler(config, pool, cadence, acceptance=SurvivalEstimator(), cost=cost)


def measure(cadence: Cadence, num_requests: int, context: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of every plan() and commit() once all requests decode."""
    num_prefills = -(-num_requests * context // BATCHED_TOKENS) + 2
    max_tokens = (num_steps + 2 * num_prefills) * (cadence.draft_limit + 1)
    scheduler = make_scheduler(cadence, num_requests, context, max_tokens)
    curves = [constant(0.8 + 0.18 * index / max(1, num_requests - 1), index) for index in range(num_requests)]
    device = BlindDevice(BLOCK_SIZE, lambda name, position: (position * 31 + int(name)) % 32000,
                         lambda name, position, drafts: accepted(curves[int(name)], position, drafts))
    for index in range(num_requests):
        prompt = [(position * 31 + index) % 32000 for position in range(context)]
        scheduler.add(Request(str(index), prompt, SamplingParams(), max_total=context + max_tokens))
    plans: list[float] = []
    commits: list[float] = []
    while len(plans) < num_steps:
        assert scheduler.num_running or scheduler.num_waiting == num_requests, "requests ended before the measurement"
        begun = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        verdicts = device.run(plan)
        answered = time.perf_counter()
        scheduler.commit(plan, verdicts)
        committed = time.perf_counter()
        if len(plan.rows) == num_requests and not any(row.tokens for row in plan.rows):
            plans.append(1e3 * (planned - begun))
            commits.append(1e3 * (committed - answered))
    return plans, commits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--policy", choices=("scripted", "direct", "autoregressive"), default="scripted")
    parser.add_argument("--limit-ms", type=float, default=0.3)
    args = parser.parse_args()
    plans, commits = measure(make_cadence(args.policy), args.requests, args.context, args.steps)
    median = statistics.median(plans)
    print(json.dumps({
        "bench": "planning", "policy": args.policy, "requests": args.requests, "context": args.context,
        "plan_ms_median": round(median, 4), "plan_ms_p99": round(statistics.quantiles(plans, n=100)[98], 4),
        "commit_ms_median": round(statistics.median(commits), 4), "limit_ms": args.limit_ms,
    }))
    return int(median > args.limit_ms)


if __name__ == "__main__":
    raise SystemExit(main())
