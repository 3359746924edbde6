"""KV in host memory: what the scheduler copies, when requests may count on it, and what is never computed twice.

The scripted device carries copies out on its own memory and fails at the row that reads a wrong cell.
"""

from collections.abc import Callable
from typing import Any

import pytest

from aspire.request import Request, SamplingParams
from aspire.schedule.host import HostPool
from aspire.schedule.offload import CopyPrice, Offload
from aspire.schedule.plan import Direction, StepPlan
from aspire.speculation.cadence import Always, Lockstep
from aspire.testing.schedule import RandomCadence, drive

MakeSetup = Callable[..., Any]


def copies(plan: StepPlan, direction: Direction) -> int:
    return sum(copy.direction is direction for copy in plan.copies)


def num_prefilled(plan: StepPlan) -> int:
    return sum(row.num_tokens for row in plan.rows if row.tokens)


def prompt(first: int, length: int) -> list[int]:
    return [(first + index) % 50 for index in range(length)]


class Watch:
    """Sums over the plans of a run."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def __call__(self, plan: StepPlan) -> None:
        if not self.plans or plan.step > self.plans[-1].step:  # the last plan is shown again while commits lag
            self.plans.append(plan)

    @property
    def prefilled(self) -> int:
        return sum(num_prefilled(plan) for plan in self.plans)

    @property
    def preempted(self) -> list[str]:
        return [name for plan in self.plans for name in plan.preempted]

    def copied(self, direction: Direction) -> int:
        return sum(copies(plan, direction) for plan in self.plans)


def crowd(setup: Any, count: int = 5, max_tokens: int = 60) -> list[Request]:
    """Requests that together need far more blocks than there are."""
    return [setup.add(f"r{index}", prompt(7 * index, 20 + index), max_tokens) for index in range(count)]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("budget", [64, 9])
@pytest.mark.parametrize("cadence", [Always(), Lockstep(3), RandomCadence(5, 1)], ids=lambda c: type(c).__name__)
def test_nothing_is_recomputed_when_the_host_has_room(make_setup: MakeSetup, cadence: Any, budget: int,
                                                      lag: int) -> None:
    """Every prompt is computed once. A return costs the unfinished block and what its rows in flight emitted, no more;
    without the host it costs all the request's tokens.

    Planted faults: prompt chunks registered when they are committed, so that one in flight at a preemption was lost
    (lag 1, budget 9); save() after the blocks were given back; allocate() not naming what is missing.
    """
    runs = {}
    for host_blocks in (0, 400):
        setup = make_setup(cadence, num_blocks=26, block_size=4, max_num_seqs=5, budget=budget, lag=lag,
                           host_blocks=host_blocks)
        requests, watch = crowd(setup), Watch()
        drive(setup.scheduler, setup.device, lag=lag, after=watch)
        assert all(request.output_token_ids == setup.output(request) for request in requests)
        assert all(len(request.output_token_ids) == 60 for request in requests)
        runs[host_blocks] = watch
    prompts = sum(20 + index for index in range(5))
    assert len(runs[400].preempted) >= 4, "the pool is too large for this test"
    assert runs[400].prefilled <= prompts + len(runs[400].preempted) * (4 + (cadence.draft_limit + 1) * (1 + lag))
    assert runs[0].prefilled > runs[400].prefilled + 40, "nor was there anything to save"
    assert runs[400].copied(Direction.TO_DEVICE) > 0


def test_a_block_is_copied_to_the_host_once(make_setup: MakeSetup) -> None:
    """Contents that came back stay on the host: a second preemption copies only what is new.

    Planted fault: restore() gave the host blocks up.
    """
    setup = make_setup(Always(), num_blocks=30, max_num_seqs=5, host_blocks=400)
    crowd(setup)
    watch = Watch()
    drive(setup.scheduler, setup.device, after=watch)
    assert len(watch.preempted) > len(set(watch.preempted)), "nobody was preempted twice"
    assert watch.copied(Direction.TO_HOST) <= sum((20 + index + 60) // 4 for index in range(5))
    kept = [copy.host_block for plan in watch.plans for copy in plan.copies if copy.direction is Direction.TO_HOST]
    assert len(kept) == len(set(kept))


def test_a_full_host_falls_back_on_recomputing(make_setup: MakeSetup) -> None:
    """Planted fault: the walk along a prefix ended at the first block that was not on the device."""
    prefilled = []
    for host_blocks in (1, 12, 400):
        setup = make_setup(Always(), num_blocks=30, max_num_seqs=5, host_blocks=host_blocks)
        requests, watch = crowd(setup), Watch()
        drive(setup.scheduler, setup.device, after=watch)
        assert all(request.output_token_ids == setup.output(request) for request in requests)
        prefilled.append(watch.prefilled)
    assert prefilled[0] > prefilled[1] > prefilled[2]


def rows_of(plan: StepPlan) -> list[str]:
    return [row.request_id for row in plan.rows]


def test_others_go_on_while_blocks_travel(make_setup: MakeSetup) -> None:
    """Two copies a step: when "mid" ends, its seven blocks leave and two of "young" come back; "young" joins after the
    five steps that this takes, in each of which "old" decodes.

    Planted faults: is_there() always true; begin_step() counting copies that were only queued; the plan's copies in
    reverse (a block that "mid" leaves may be one that "young" gets).
    """
    setup = make_setup(Always(), num_blocks=18, max_num_seqs=3, host_blocks=50, copies_per_step=2)
    setup.add("old", prompt(0, 12), 40)
    setup.add("mid", prompt(40, 20), 12)
    young, watch = setup.add("young", prompt(25, 24), 20), Watch()
    drive(setup.scheduler, setup.device, after=watch)
    back = next(plan for plan in watch.plans if copies(plan, Direction.TO_DEVICE))
    assert (copies(back, Direction.TO_HOST), copies(back, Direction.TO_DEVICE)) == (7, 2)
    assert [copy.direction for copy in back.copies] == [Direction.TO_HOST] * 7 + [Direction.TO_DEVICE] * 2
    after = [rows_of(plan) for plan in watch.plans[back.step:back.step + 6]]
    assert after == [["old"]] * 5 + [["old", "young"]]
    assert young.output_token_ids == setup.output(young)


def test_a_new_request_lets_others_go_on_while_its_blocks_are_copied_away(make_setup: MakeSetup) -> None:
    """It gets the end of the table that leaves, of whose seven copies these five are the first: three steps.

    Planted faults: awaits set from what a request's own copies are, not from all copies of its blocks; copies in the
    order of the table, of which it would await all seven.
    """
    setup = make_setup(Always(), num_blocks=16, max_num_seqs=3, host_blocks=50, copies_per_step=2)
    setup.add("old", prompt(0, 12), 40)
    setup.add("mid", prompt(40, 20), 12)
    setup.add("young", prompt(25, 24), 20)
    watch = Watch()
    drive(setup.scheduler, setup.device, after=watch)
    seated = next(plan for plan in watch.plans if any(a.request_id == "young" for a in plan.admissions))
    assert (copies(seated, Direction.TO_HOST), copies(seated, Direction.TO_DEVICE)) == (7, 0)
    after = [rows_of(plan) for plan in watch.plans[seated.step:seated.step + 5]]
    assert after == [["old"]] * 3 + [["old", "young"]] * 2


def test_who_is_alone_does_not_wait(make_setup: MakeSetup) -> None:
    """Planted fault: no second thought for a plan without rows; with one copy a step it was empty twice in a row."""
    setup = make_setup(Always(), num_blocks=12, max_num_seqs=2, host_blocks=50, copies_per_step=1)
    requests = [setup.add("old", prompt(0, 22), 16), setup.add("young", prompt(25, 20), 20)]
    watch = Watch()
    drive(setup.scheduler, setup.device, after=watch)
    back = next(plan for plan in watch.plans if copies(plan, Direction.TO_DEVICE) > 1)
    assert rows_of(back) == ["young"]
    assert all(request.output_token_ids == setup.output(request) for request in requests)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_end_while_waiting_gives_the_claim_up(make_setup: MakeSetup, lag: int) -> None:
    """Aborted, or stopped by a verdict in flight, a preempted request leaves nothing that others could not use.

    Planted fault: remove() without disclaim(); Offload.check then names the stray claim.
    """
    setup = make_setup(Always(), num_blocks=30, max_num_seqs=5, host_blocks=400, lag=lag)
    crowd(setup)
    aborted: list[str] = []

    def abort_waiting(plan: StepPlan) -> None:
        for name in plan.preempted:
            if setup.scheduler.offload.host.claimants and len(aborted) < 2:
                setup.scheduler.abort(name)
                aborted.append(name)
                assert name not in setup.scheduler.offload.host.claimants

    drive(setup.scheduler, setup.device, lag=lag, after=abort_waiting)
    assert len(aborted) == 2
    assert setup.scheduler.offload.host.claimants == ()


def test_an_evicted_prefix_comes_back_from_the_host(make_setup: MakeSetup) -> None:
    """A second-level prefix cache: the same prompt later, when the device has long forgotten it.

    Planted fault: keep() left out of remove().
    """
    setup = make_setup(Always(), num_blocks=20, max_num_seqs=1, host_blocks=100)
    shared = prompt(3, 41)
    setup.add("first", shared, 4)
    drive(setup.scheduler, setup.device)
    setup.add("other", prompt(20, 70), 10)
    drive(setup.scheduler, setup.device)
    assert setup.scheduler.pool.match(shared) == (), "the device has not forgotten it"
    again, watch = setup.add("again", shared, 4), Watch()
    drive(setup.scheduler, setup.device, after=watch)
    assert again.counters.num_cached_tokens == 40
    assert (watch.prefilled, setup.device.num_restored) == (1, 10)
    assert again.output_token_ids == setup.output(again)


def test_prompt_logprobs_recompute_everything(make_setup: MakeSetup) -> None:
    """Every prompt token's logits are needed: nothing comes from the host. Planted fault: `uses_cache` always true."""
    setup = make_setup(Always(), num_blocks=20, max_num_seqs=1, host_blocks=100)
    setup.add("first", prompt(3, 20), 4)
    drive(setup.scheduler, setup.device)
    setup.add("other", prompt(20, 70), 10)
    drive(setup.scheduler, setup.device)
    setup.add("again", prompt(3, 20), 4, params=SamplingParams(prompt_logprobs=1))
    drive(setup.scheduler, setup.device)
    assert setup.device.num_restored == 0


def test_plans_are_the_same_every_time(make_setup: MakeSetup) -> None:
    """Planted fault: the number through taken from the clock in begin_step()."""
    plans = []
    for _ in range(2):
        setup = make_setup(RandomCadence(4, 3), num_blocks=30, max_num_seqs=5, host_blocks=12, copies_per_step=3)
        crowd(setup)
        watch = Watch()
        drive(setup.scheduler, setup.device, after=watch)
        plans.append(watch.plans)
    assert plans[0] == plans[1]


def test_a_lossy_policy_offloads_only_what_full_rows_wrote(make_setup: MakeSetup) -> None:
    """Planted fault: commits register what sparse rows wrote; the device refuses to bring that back."""
    setup = make_setup(Always(), num_blocks=30, max_num_seqs=5, host_blocks=400, sparse_emits=True)
    requests, watch = crowd(setup), Watch()
    drive(setup.scheduler, setup.device, after=watch)
    assert watch.preempted
    assert all(request.output_token_ids == setup.output(request) for request in requests)


def test_what_is_given_away_first_is_copied_first() -> None:
    """The pool reuses a table from its end, and whoever gets a block waits for its copy; but the beginning is what
    has a place. Planted fault: copies in the order of the table."""
    offload = Offload(HostPool(4), 8)
    offload.save("r", [(10 + index, bytes([index])) for index in range(6)])
    assert [copy.block for copy in offload.take_copies()] == [13, 12, 11, 10]
    offload.host.disclaim("r")
    offload.keep([(20 + index, bytes([7, index])) for index in range(3)])
    assert [copy.block for copy in offload.take_copies()] == [22, 21, 20]


def test_price_of_a_copy() -> None:
    """Planted fault: the comparison turned round."""
    price = CopyPrice(copy=1e-4, compute=2e-4, step=0.0105)
    assert (price.pays, price.copies_per_step) == (True, 105)
    slow = CopyPrice(copy=2e-2, compute=1e-2, step=1e-2)
    assert (slow.pays, slow.copies_per_step) == (False, 1)
