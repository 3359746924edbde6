"""Random schedules end, give plain decoding's tokens and keep the books, against what a slow walk of the script says.

The oracle: a request's output is its script up to its stop or max_tokens, whatever the cadence, the verdicts, the pool,
the budget, preemptions, the lag of commits and the others' aborts. The scripted device checks every KV cell read.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire.request import FinishReason, Request
from aspire.schedule.plan import StepPlan
from aspire.speculation.cadence import Adaptive, Always, Cadence, Lockstep, Staggered
from aspire.speculation.direct import Direct
from aspire.testing.schedule import RandomCadence, drive

MakeSetup = Callable[..., Any]


class StopAt:
    """Ends a request at its n-th output token, by count, so that the oracle needs no token values."""

    def __init__(self, num_output: int) -> None:
        self.num_output = num_output

    def check(self, token_id: int, num_output: int) -> FinishReason | None:
        assert num_output <= self.num_output, "shown a token after its stop"
        return FinishReason.STOP if num_output == self.num_output else None


def make_cadence(random: Random) -> Cadence:
    limit = random.choice([1, 2, 3, 8])
    return random.choice([
        Always(), Lockstep(limit), Staggered(limit), Adaptive(limit=limit), Direct(),
        RandomCadence(limit, random.randrange(99)), RandomCadence(limit, random.randrange(99), draft=0.95, wait=0.4),
    ])


def accept_at_random(seed: int) -> Callable[[str, int, int], int]:
    """Often all, sometimes none, by place and not by draft length, as the real thing."""
    return lambda name, position, num_drafted: Random(f"{seed}/{name}/{position}").choice([0, 1, 2, 5, 99])


def make_prompts(random: Random, count: int) -> list[list[int]]:
    """Prompts of which some begin alike and some are equal."""
    common = [random.randrange(50) for _ in range(24)]
    prompts = [common[:random.randrange(25)] + [random.randrange(50) for _ in range(random.randint(1, 12))]
               for _ in range(count)]
    return [random.choice(prompts[:index + 1]) if random.random() < 0.2 else prompt
            for index, prompt in enumerate(prompts)]


class Traffic:
    """Adds requests, aborts some, and knows how each must end."""

    def __init__(self, setup: Any, random: Random, count: int, max_output: int) -> None:
        self.setup, self.random = setup, random
        self.todo = list(enumerate(make_prompts(random, count)))
        self.max_output = max_output
        self.requests: list[Request] = []
        self.num_expected: list[int] = []
        self.aborted: list[str] = []

    def add_one(self) -> None:
        index, prompt = self.todo.pop(0)
        max_tokens = self.random.randint(self.max_output // 2 + 1, self.max_output)
        stop = self.random.choice([self.random.randint(1, self.max_output), 10**6])
        same = [request for request in self.requests if request.prompt_token_ids == prompt]
        self.requests.append(self.setup.add(
            f"r{index}", prompt, max_tokens, priority=self.random.choice([0, 0, 1]), stop_checker=StopAt(stop),
            leader=same[0] if same else None))
        self.num_expected.append(min(max_tokens, stop))

    def after(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.setup.scheduler.config.max_num_batched_tokens
        assert len({row.request_id for row in plan.rows}) == len(plan.rows), "two rows of one request"
        first_prefill = next((i for i, row in enumerate(plan.rows) if row.tokens), len(plan.rows))
        assert all(row.tokens for row in plan.rows[first_prefill:]), "decoding rows come first"
        if self.todo and self.random.random() < 0.3:
            self.add_one()
        if self.random.random() < 0.03:
            victim = self.random.choice(self.requests)
            if self.setup.scheduler.abort(victim.request_id) is not None:
                self.aborted.append(victim.request_id)

    def check_outcome(self, finished: list[Request]) -> None:
        ended = sorted(request.request_id for request in finished)
        assert sorted([*ended, *self.aborted]) == sorted(request.request_id for request in self.requests)
        for request, num_expected in zip(self.requests, self.num_expected, strict=True):
            assert request.output_token_ids == self.setup.output(request), request.request_id
            counters = request.counters
            assert counters.num_emitted == len(request.output_token_ids)
            if request.request_id not in self.aborted:
                assert len(request.output_token_ids) == num_expected
                assert counters.num_emitted == 1 + counters.num_accepted + counters.num_verifications or \
                    counters.num_preempted > 0, "a prefill emits one, a verification its accepted drafts and one"
        made = sum(request.counters.num_drafted + request.counters.num_wasted for request in self.requests)
        assert made == self.setup.device.num_drafts_made, "drafts without a fate"


def run_random_schedule(make_setup: MakeSetup, seed: int) -> Traffic:
    return run_traffic(make_setup, *random_case(seed))


def run_traffic(make_setup: MakeSetup, random: Random, seed: int, options: dict[str, Any], count: int,
                max_output: int) -> Traffic:
    setup = make_setup(**options, accepted=accept_at_random(seed))
    traffic = Traffic(setup, random, count, max_output)
    finished: list[Request] = []
    while traffic.todo:
        traffic.add_one()
        finished += drive(setup.scheduler, setup.device, lag=options["lag"], after=traffic.after)
    traffic.check_outcome(finished)
    return traffic


Case = tuple[Random, int, dict[str, Any], int, int]


def random_case(seed: int) -> Case:
    random = Random(seed)
    cadence, lag = make_cadence(random), random.choice([0, 1])
    block_size, max_output = random.choice([1, 2, 16]), random.choice([3, 12, 40])
    fits = -(-(36 + max_output) // block_size)  # one request of the largest size
    options = {
        "cadence": cadence, "num_blocks": fits + random.choice([0, 1, fits // 2, 4 * fits]), "block_size": block_size,
        "max_num_seqs": random.randint(2, 6), "budget": random.choice([1, 2, 3, 7, 20, 500]), "lag": lag,
        "prefix_caching": random.random() < 0.8}
    return random, seed, options, random.randint(1, 8), max_output


def crowded_case(seed: int) -> Case:
    """Many long requests for a small pool, and host memory of any size."""
    random = Random(seed)
    block_size = random.choice([1, 2, 4])
    fits = -(-76 // block_size)
    options = {
        "cadence": make_cadence(random), "num_blocks": fits + random.choice([0, 1, fits // 2, fits]),
        "block_size": block_size, "max_num_seqs": random.randint(3, 6), "budget": random.choice([2, 7, 20, 500]),
        "lag": random.choice([0, 1]), "host_blocks": random.choice([1, fits // 2, 2 * fits, 20 * fits]),
        "copies_per_step": random.choice([1, 5, 99])}
    return random, seed, options, random.randint(6, 12), 40


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_schedule_gives_plain_decodings_tokens(make_setup: MakeSetup, seed: int) -> None:
    """Planted faults, each caught here: draft KV registered in the prefix cache; num_computed kept over a preemption;
    block updates of a victim sent on; the reserve one token short; a follower's match beyond the computed prompt."""
    run_random_schedule(make_setup, seed)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_schedule_with_host_memory(make_setup: MakeSetup, seed: int) -> None:
    """The device moves contents as the plans say, and fails at the row that reads a wrong cell."""
    run_traffic(make_setup, *crowded_case(seed))


def test_the_hard_cases_occur(make_setup: MakeSetup) -> None:
    """The generator itself: without preemptions, aborts, cache hits and waste the test above shows little."""
    runs = [run_random_schedule(make_setup, seed) for seed in range(60)]
    counters = [request.counters for run in runs for request in run.requests]
    assert sum(c.num_preempted for c in counters) >= 10
    assert sum(c.num_cached_tokens > 0 for c in counters) >= 10
    assert sum(c.num_wasted > 0 for c in counters) >= 10
    assert sum(len(run.aborted) for run in runs) >= 10
    assert sum(request.leader is not None for run in runs for request in run.requests) >= 10


def test_the_hard_cases_of_host_memory_occur(make_setup: MakeSetup) -> None:
    runs = [run_traffic(make_setup, *crowded_case(seed)) for seed in range(40)]
    assert sum(run.setup.device.num_restored > 0 for run in runs) >= 20
    assert sum(request.counters.num_preempted for run in runs for request in run.requests) >= 40
    assert sum(len(run.aborted) for run in runs) >= 10


@pytest.mark.parametrize("lag", [0, 1])
def test_lossy_policy_on_random_traffic(make_setup: MakeSetup, lag: int) -> None:
    """Planted fault: a lossy row does not advance num_computed, and its request is taken for one in prefill."""
    for seed in range(20):
        random = Random(seed)
        setup = make_setup(Always(), sparse_emits=True, num_blocks=60, block_size=2, lag=lag,
                           budget=random.choice([2, 9, 64]))
        traffic = Traffic(setup, random, 5, 12)
        while traffic.todo:
            traffic.add_one()
            drive(setup.scheduler, setup.device, lag=lag, after=traffic.after)
        assert all(request.output_token_ids == setup.output(request) for request in traffic.requests)
        assert all(request.counters.num_verifications == 0 for request in traffic.requests)
