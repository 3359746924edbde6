"""What the scheduler decides, one behaviour a test. Random schedules are in test_random_schedules.py.

The scripted device fails at once where a row would read KV that is not its own, and `drive` checks the books.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from aspire.request import FinishReason, Request, SamplingParams
from aspire.schedule.plan import RowKind, StepPlan
from aspire.schedule.scheduler import Scheduler, SchedulerConfig
from aspire.speculation.cadence import Always, Decision, Drafting, Lockstep, Outlook
from aspire.testing.schedule import RandomCadence, ScriptedCadence, drive

MakeSetup = Callable[..., Any]
DRAFT, VERIFY, WAIT = Decision.DRAFT, Decision.VERIFY, Decision.WAIT
TWO_DRAFTS = ScriptedCadence(2, (DRAFT,))  # drafts while it may


@dataclass
class Watching:
    """Passes on what a cadence was shown."""

    inner: Any
    seen: list[tuple[list[Drafting], Outlook]] = field(default_factory=list)

    @property
    def draft_limit(self) -> int:
        return int(self.inner.draft_limit)

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        self.seen.append((list(requests), outlook))
        return list(self.inner.decide(requests, outlook))


def kinds(plan: StepPlan) -> list[tuple[str, RowKind, int]]:
    return [(row.request_id, row.kind, row.num_tokens) for row in plan.rows]


def step(setup: Any) -> tuple[StepPlan, list[Request]]:
    plan = setup.scheduler.plan()
    finished = setup.scheduler.commit(plan, setup.device.run(plan))
    setup.scheduler.check()
    return plan, finished


def test_a_request_drafts_verifies_and_ends_at_max_tokens(make_setup: MakeSetup) -> None:
    """Planted fault: room forgets the bonus token, so the last verification emits one token too many."""
    setup = make_setup(TWO_DRAFTS)
    request = setup.add("a", [7, 8, 9], 6)
    seen = [kinds(step(setup)[0])[0][1:] for _ in range(6)]
    full, sparse = RowKind.FULL, RowKind.SPARSE
    # 1 token from the prefill, 3 from a whole round, and with 2 left one draft and its bonus token.
    assert seen == [(full, 3), (sparse, 1), (sparse, 1), (full, 3), (sparse, 1), (full, 2)]
    assert request.output_token_ids == setup.output(request)
    assert (request.finish_reason, len(request.output_token_ids)) == (FinishReason.LENGTH, 6)
    assert setup.acceptance.observed == [("a", 2, 2), ("a", 1, 1)]
    assert [entry[:2] for entry in setup.acceptance.noted] == [("a", 1), ("a", 2), ("a", 1)]
    assert setup.acceptance.forgotten == ["a"]
    assert not setup.scheduler.has_unfinished


def test_prefill_chunks_share_a_step_with_decoding_rows(make_setup: MakeSetup) -> None:
    """Planted faults: the budget of decoding rows is not taken off the prefill's; prefill rows come first."""
    setup = make_setup(Always(), budget=8)
    setup.add("a", [1, 2], 20)
    step(setup)
    setup.add("b", list(range(20)), 2)
    full = RowKind.FULL
    assert [kinds(step(setup)[0]) for _ in range(4)] == [
        [("a", full, 1), ("b", full, 7)], [("a", full, 1), ("b", full, 7)],
        [("a", full, 1), ("b", full, 6)], [("a", full, 1), ("b", full, 1)]]


def test_only_the_last_chunk_of_a_prompt_samples(make_setup: MakeSetup) -> None:
    """Planted fault: has_full_row after the first chunk, so a request drafts on half a prompt."""
    setup = make_setup(TWO_DRAFTS, budget=4)
    setup.add("a", list(range(9)), 4)
    rows = [step(setup)[0].rows[0] for _ in range(4)]
    assert [(row.start, row.num_tokens, row.samples, row.emits) for row in rows[:3]] == [
        (0, 4, False, False), (4, 4, False, False), (8, 1, True, True)]
    assert rows[3].kind is RowKind.SPARSE


def test_one_token_prompt_starts_with_a_full_row(make_setup: MakeSetup) -> None:
    """Planted fault: `num_computed == num_known - 1` taken for decoding; a one-token prompt then drafts on nothing."""
    setup = make_setup(TWO_DRAFTS)
    setup.add("a", [3], 4)
    assert kinds(step(setup)[0]) == [("a", RowKind.FULL, 1)]


def test_verification_that_does_not_fit_drafts_on_or_waits_and_is_never_split(make_setup: MakeSetup) -> None:
    """Planted faults: the row is cut to the budget; a dropped verification does nothing."""

    @dataclass(frozen=True)
    class AfterTwo:
        draft_limit: int = 4

        def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
            return [VERIFY if request.num_drafted >= 2 or not request.room else DRAFT for request in requests]

    setup = make_setup(AfterTwo(), budget=5, max_num_seqs=3)
    requests = [setup.add(name, [index, 5], 30) for index, name in enumerate("abc")]
    drafted_on = 0

    def after(plan: StepPlan) -> None:
        nonlocal drafted_on
        assert plan.num_tokens <= 5
        drafted_on += sum(row.num_drafted >= 2 for row in plan.rows if row.kind is RowKind.SPARSE)

    drive(setup.scheduler, setup.device, after=after)
    assert drafted_on > 0, "no dropped verification ever drafted on"
    assert all(request.output_token_ids == setup.output(request) for request in requests)


@pytest.mark.parametrize("budget", [1, 2, 3, 16])
def test_budget_smaller_than_a_round_caps_the_round(make_setup: MakeSetup, budget: int) -> None:
    """Planted fault: room comes from the cadence's limit alone; a verification of 9 tokens never fits 3."""
    watch = Watching(ScriptedCadence(8, (DRAFT,)))
    setup = make_setup(watch, budget=budget)
    request = setup.add("a", [1, 2, 3], 30)
    drive(setup.scheduler, setup.device)
    assert request.output_token_ids == setup.output(request)
    assert max(d.num_drafted for shown, _ in watch.seen for d in shown) == min(8, budget - 1)


def test_decoding_does_not_starve_prefill(make_setup: MakeSetup) -> None:
    """Planted fault: prefill gets only what decoding leaves, which is nothing while the budget is full."""
    setup = make_setup(Always(), budget=2, max_num_seqs=3)
    for name in "ab":
        setup.add(name, [1, ord(name)], 200)
    for _ in range(4):
        step(setup)
    late = setup.add("late", list(range(10)), 1)
    for _ in range(40):
        step(setup)
    assert late.finish_reason is FinishReason.LENGTH


def test_decoding_requests_take_turns_when_the_budget_is_short(make_setup: MakeSetup) -> None:
    """Planted fault: the budget is dealt in order of admission, so the last ones stand still."""
    setup = make_setup(Always(), budget=2, max_num_seqs=5)
    requests = [setup.add(name, [1, ord(name)], 60) for name in "abcde"]
    for _ in range(20):
        step(setup)
    before = [len(request.output_token_ids) for request in requests]
    for _ in range(25):
        step(setup)
    gains = [len(request.output_token_ids) - start for request, start in zip(requests, before, strict=True)]
    assert gains == [10] * 5


def test_a_long_verification_is_not_starved_by_short_rows(make_setup: MakeSetup) -> None:
    """Planted fault: no turns, so two plain rows always take the place of four tokens."""

    @dataclass(frozen=True)
    class OneDrafts:
        draft_limit: int = 3

        def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
            return [DRAFT if request.request_id == "long" and request.room else VERIFY for request in requests]

    setup = make_setup(OneDrafts(), budget=4)
    setup.add("x", [1, 2], 40)
    setup.add("y", [1, 3], 40)
    long = setup.add("long", [1, 4], 20)
    for _ in range(30):
        step(setup)
    assert long.counters.num_verifications >= 3


def test_waiting_requests_are_admitted_by_priority_then_arrival(make_setup: MakeSetup) -> None:
    """Planted fault: plain FIFO."""
    setup = make_setup(Always(), max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        setup.add(name, [1, ord(name)], 2, priority=priority)
    assert [request.request_id for request in setup.scheduler.waiting] == ["b", "d", "a", "c"]
    finished = drive(setup.scheduler, setup.device)
    assert [request.request_id for request in finished] == ["b", "d", "a", "c"]


def test_nobody_passes_a_request_that_waits_for_blocks(make_setup: MakeSetup) -> None:
    """Planted fault: admission goes on with the next request; a long prompt then waits for ever."""
    setup = make_setup(Always(), num_blocks=6, block_size=4)
    setup.add("a", list(range(10)), 6)
    setup.add("big", list(range(100, 116)), 4)
    setup.add("small", [1, 2], 2)
    admitted: list[str] = []
    drive(setup.scheduler, setup.device,
          after=lambda plan: admitted.extend(admission.request_id for admission in plan.admissions))
    assert admitted == ["a", "big", "small"]


@pytest.mark.parametrize("lag", [0, 1])
def test_the_youngest_is_preempted_and_resumes_with_its_tokens(make_setup: MakeSetup, lag: int) -> None:
    """Planted faults: the oldest as victim; output dropped at preemption; num_computed kept over it."""
    setup = make_setup(TWO_DRAFTS, num_blocks=13, block_size=2, lag=lag, prefix_caching=False)
    old, young = setup.add("old", [1, 2, 3], 16), setup.add("young", [4, 5, 6], 16)
    preempted: list[str] = []
    drive(setup.scheduler, setup.device, lag=lag, after=lambda plan: preempted.extend(plan.preempted))
    assert preempted, "the pool is too large for this test"
    assert set(preempted) == {"young"}
    assert (old.counters.num_preempted, young.counters.num_preempted) == (0, len(preempted))
    for request in (old, young):
        assert request.output_token_ids == setup.output(request)
        assert len(request.output_token_ids) == 16
    drafted = sum(request.counters.num_drafted + request.counters.num_wasted for request in (old, young))
    assert drafted == setup.device.num_drafts_made


def test_a_worse_priority_steps_back_for_an_older_growth(make_setup: MakeSetup) -> None:
    """Planted fault: the victim is the last admitted, not the last in order."""
    setup = make_setup(Always(), num_blocks=9, block_size=2)
    low = setup.add("low", [1, 2, 3], 12, priority=5)
    step(setup)
    high = setup.add("high", [4, 5, 6], 12)
    drive(setup.scheduler, setup.device)
    assert (high.counters.num_preempted, low.counters.num_preempted > 0) == (0, True)


def test_verdict_of_a_request_preempted_meanwhile_is_kept(make_setup: MakeSetup) -> None:
    """Planted fault: commit skips requests that do not run; the stop of the first verdict is lost."""
    setup = make_setup(Always(), num_blocks=4, block_size=2, lag=1)
    old, young = setup.add("old", [1], 7), setup.add("young", [2], 7)
    flying = []
    while True:
        plan = setup.scheduler.plan()
        flying.append((plan, setup.device.run(plan)))
        if plan.preempted:
            break
        if len(flying) > 1:
            setup.scheduler.commit(*flying.pop(0))
    before = len(young.output_token_ids)
    assert any(row.request_id == "young" for row in flying[0][0].rows), "the case needs a row in flight"
    setup.scheduler.commit(*flying.pop(0))
    assert (young.slot, len(young.output_token_ids)) == (None, before + 1)
    setup.scheduler.commit(*flying.pop(0))
    drive(setup.scheduler, setup.device, lag=1)
    assert [r.output_token_ids for r in (old, young)] == [setup.output(old), setup.output(young)]


def test_followers_wait_for_their_leader_and_share_its_blocks(make_setup: MakeSetup) -> None:
    """Planted faults: followers are admitted at once and compute the prompt again; nobody may pass a follower."""
    setup = make_setup(Always(), block_size=4, budget=8)
    prompt = list(range(18))
    leader = setup.add("a0", prompt, 3)
    follower = setup.add("a1", prompt, 3, leader=leader)
    other = setup.add("b", [9, 9], 3)
    plans = []
    drive(setup.scheduler, setup.device, after=plans.append)
    admitted = [admission.request_id for plan in plans for admission in plan.admissions]
    assert admitted == ["a0", "b", "a1"]
    assert (leader.counters.num_cached_tokens, follower.counters.num_cached_tokens) == (0, 16)
    assert other.is_finished


def test_a_follower_does_not_wait_for_a_leader_that_is_gone(make_setup: MakeSetup) -> None:
    """Planted fault: only the leader's output counts; after its abort the follower waits for ever."""
    setup = make_setup(Always(), budget=4)
    leader = setup.add("a0", list(range(18)), 3)
    follower = setup.add("a1", list(range(18)), 3, leader=leader)
    step(setup)
    setup.scheduler.abort("a0")
    drive(setup.scheduler, setup.device)
    assert follower.output_token_ids == setup.output(follower)


def test_prompt_logprobs_take_nothing_from_the_cache(make_setup: MakeSetup) -> None:
    """Planted fault: the cached part of the prompt has no logits, so its logprobs are missing."""
    setup = make_setup(Always(), block_size=2)
    setup.add("a", [1, 2, 3, 4, 5], 2)
    drive(setup.scheduler, setup.device)
    asking = setup.add("b", [1, 2, 3, 4, 5], 2, params=SamplingParams(prompt_logprobs=1))
    plain = setup.add("c", [1, 2, 3, 4, 5], 2)
    drive(setup.scheduler, setup.device)
    assert (asking.counters.num_cached_tokens, plain.counters.num_cached_tokens) == (0, 4)


@pytest.mark.parametrize("lag", [0, 1])
def test_abort_waiting_running_and_in_flight(make_setup: MakeSetup, lag: int) -> None:
    """Planted faults: a late verdict finds its request by name and feeds a new one of that name; slots leak."""
    setup = make_setup(RandomCadence(3, seed=1), max_num_seqs=2, lag=lag)
    first, other, waiting = (setup.add(name, [1, ord(name[0])], 12) for name in ("same", "other", "waiting"))
    plan = setup.scheduler.plan()
    verdicts = setup.device.run(plan)
    assert setup.scheduler.abort("waiting") is waiting
    assert setup.scheduler.abort("same") is first
    assert setup.scheduler.abort("same") is None
    again = setup.add("same", [5, 6, 7], 12)
    assert setup.scheduler.commit(plan, verdicts) == []
    setup.scheduler.check()
    drive(setup.scheduler, setup.device, lag=lag)
    assert (first.output_token_ids, first.finish_reason) == ([], FinishReason.ABORT)
    assert [again.output_token_ids, other.output_token_ids] == [setup.output(again), setup.output(other)]
    assert len(again.output_token_ids) == 12


def test_lossy_policy_emits_from_sparse_rows_and_shares_none_of_their_kv(make_setup: MakeSetup) -> None:
    """Planted fault: what sparse rows wrote enters the prefix cache."""
    setup = make_setup(Always(), sparse_emits=True, block_size=2)
    request = setup.add("a", [1, 2, 3], 8)
    plans = []
    drive(setup.scheduler, setup.device, after=plans.append)
    rows = [plan.rows[0] for plan in plans]
    assert [(row.kind, row.emits) for row in rows] == [(RowKind.FULL, True)] + [(RowKind.SPARSE, True)] * 7
    assert request.output_token_ids == setup.output(request)
    again = setup.add("b", [1, 2, 3, *request.output_token_ids], 1)
    step(setup)
    assert again.counters.num_cached_tokens == 2


def test_lag_wastes_no_row_on_a_request_that_surely_ends(make_setup: MakeSetup) -> None:
    """Planted fault: surely_ends ignored: one surplus row for every request that ends by length."""
    setup = make_setup(Always(), lag=1)
    setup.add("a", [1, 2], 5)
    drive(setup.scheduler, setup.device, lag=1)
    assert setup.device.rows_run == 5


def test_room_counts_what_rows_in_flight_may_emit(make_setup: MakeSetup) -> None:
    """Planted fault: `pending` left out of room: with one token left after the verification in flight, it drafts."""
    setup = make_setup(TWO_DRAFTS, lag=1)
    request = setup.add("a", [1, 2], 5)
    drive(setup.scheduler, setup.device, lag=1)
    assert (request.output_token_ids, setup.device.num_drafts_made) == (setup.output(request), 2)


def test_the_cadence_sees_margins_room_and_prefill(make_setup: MakeSetup) -> None:
    """Planted faults: the margin survives its verification; prefill_tokens is 0 while a prompt is computed."""
    watch = Watching(TWO_DRAFTS)
    setup = make_setup(watch, budget=16)
    setup.add("a", [1, 2, 3], 9)
    for _ in range(3):
        step(setup)
    setup.add("b", list(range(40)), 2)
    for _ in range(2):
        step(setup)
    shown = [(d[0].num_drafted, d[0].room, d[0].draft_margin, outlook.prefill_tokens) for d, outlook in watch.seen]
    assert shown == [(0, 2, None, 0), (1, 1, 3.0, 0), (2, 0, 4.0, 15), (0, 2, None, 15)]


def test_a_late_margin_does_not_outlive_its_round(make_setup: MakeSetup) -> None:
    """Planted fault: under overlap the last draft's verdict comes after its verification is planned, and stays."""
    watch = Watching(TWO_DRAFTS)
    setup = make_setup(watch, lag=1)
    setup.add("a", [1, 2, 3], 12)
    drive(setup.scheduler, setup.device, lag=1)
    shown = [(d[0].num_drafted, d[0].draft_margin) for d, _ in watch.seen if d]
    assert all(margin is None for num_drafted, margin in shown if num_drafted == 0), shown
    assert any(margin is not None for _, margin in shown)


def test_admission_waits_while_there_is_prefill_enough(make_setup: MakeSetup) -> None:
    """Planted fault: all are admitted at once; blocks are held idle and the second cannot share the first's."""
    setup = make_setup(Always(), budget=4, block_size=2)
    setup.add("a", list(range(20)), 2)
    second = setup.add("b", list(range(20)), 2)
    drive(setup.scheduler, setup.device)
    assert second.counters.num_cached_tokens >= 14


def test_lockstep_on_a_full_pool_goes_on_after_a_preemption(make_setup: MakeSetup) -> None:
    """Planted fault: lookahead 1 instead of one whole round (refused at construction since)."""
    setup = make_setup(Lockstep(4), num_blocks=18, block_size=2, max_num_seqs=3)
    requests = [setup.add(name, [index] * 3, 20) for index, name in enumerate("abc")]
    drive(setup.scheduler, setup.device)
    assert sum(request.counters.num_preempted for request in requests) > 0
    assert all(request.output_token_ids == setup.output(request) for request in requests)


def test_two_empty_plans_in_a_row_are_a_bug(make_setup: MakeSetup) -> None:
    """Planted fault: the assertion is left out and an engine spins."""
    setup = make_setup(ScriptedCadence(2, (WAIT,)))
    setup.add("a", [1, 2], 4)
    step(setup)
    step(setup)
    with pytest.raises(AssertionError, match="two empty plans"):
        setup.scheduler.plan()


def test_plans_without_work_may_be_empty(make_setup: MakeSetup) -> None:
    """Planted fault: idle plans count as empty ones."""
    setup = make_setup(Always())
    for _ in range(3):
        assert step(setup)[0].rows == ()


@pytest.mark.parametrize(("prompt", "max_tokens", "message"), [
    ([], 4, "at least 1 token, got 0"),
    ([1] * 30, 100, r"KV cache of 32 tokens \(8 blocks of 4\), got 130"),
    ([1] * 5000, 1, r"max_model_len \(4096\), got 5001"),
    ([1, 2], 0, "plus at least 1 token of output"),
], ids=["empty", "pool", "limit", "no-output"])
def test_a_request_that_can_never_run_is_refused(make_setup: MakeSetup, prompt: list[int], max_tokens: int,
                                                 message: str) -> None:
    """Planted fault: the check is made for the prompt only; the request then preempts itself for ever."""
    setup = make_setup(Always(), num_blocks=8, block_size=4)
    with pytest.raises(ValueError, match=message):
        setup.add("a", prompt, max_tokens)
    assert not setup.scheduler.has_unfinished
    setup.add("b", [1], 4)
    with pytest.raises(ValueError, match="request_id must be unique"):
        setup.add("b", [2], 4)


def test_config_is_checked() -> None:
    """Planted fault: max_num_seqs 0 makes an engine that never admits."""
    with pytest.raises(ValueError, match="max_num_seqs must be an integer >= 1, got 0"):
        SchedulerConfig(0, 16, 128, 16, 1)
    with pytest.raises(ValueError, match="max_num_batched_tokens must be an integer >= 1, got -1"):
        SchedulerConfig(1, -1, 128, 16, 1)


def test_commits_come_in_order(make_setup: MakeSetup) -> None:
    """Planted fault: commit takes any plan; under overlap the counts of two steps are swapped."""
    setup = make_setup(Always(), lag=1)
    setup.add("a", [1, 2], 4)
    first = setup.scheduler.plan()
    second = setup.scheduler.plan()
    with pytest.raises(AssertionError, match="two steps in flight"):
        setup.scheduler.plan()
    setup.device.run(first)
    with pytest.raises(AssertionError, match="oldest in flight"):
        setup.scheduler.commit(second, setup.device.run(second))


def test_check_sees_a_waiting_request_with_counts(make_setup: MakeSetup) -> None:
    """The check itself: the fault is planted here."""
    setup = make_setup(Always())
    request = setup.add("a", [1, 2], 4)
    request.num_computed = 1
    with pytest.raises(AssertionError, match="waiting"):
        Scheduler.check(setup.scheduler)
