"""The step loop, twice: plain (plan, launch, wait, commit) and overlapped (commit of step t after the launch of t+1).

Both give equal tokens: counts and tokens are device truth, so planning never waits for a verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from aspire.request import Request
from aspire.schedule.plan import StepPlan, Verdict
from aspire.schedule.scheduler import Scheduler


class Pending(Protocol):
    """A launched step."""

    @property
    def plan(self) -> StepPlan: ...

    def verdicts(self) -> list[Verdict]: ...


class StepRunner(Protocol):
    """What a loop needs of a runner."""

    def launch(self, plan: StepPlan, requests: Mapping[str, Request]) -> Pending: ...

    def must_wait(self, plan: StepPlan) -> bool: ...

    def add_free_drafts(self, plan: StepPlan, scheduler: Scheduler) -> None: ...

    def broken(self, plan: StepPlan) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Done:
    """A committed step and the requests that ended with it. broken: requests whose output left their grammar, because
    bans had left nothing that it allows; they must not go on."""

    plan: StepPlan
    verdicts: list[Verdict]
    ended: list[Request]
    broken: tuple[str, ...] = ()


def commit(scheduler: Scheduler, runner: StepRunner, step: Pending) -> Done:
    """Wait for a step and apply it. Then, unless another step is in flight, what needs no model is drafted."""
    verdicts = step.verdicts()
    ended = scheduler.commit(step.plan, verdicts)
    runner.add_free_drafts(step.plan, scheduler)
    return Done(step.plan, verdicts, ended, runner.broken(step.plan))


class PlainLoop:
    """One step at a time; the host waits for the device."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    def advance(self, requests: Mapping[str, Request]) -> Done | None:
        plan = self.scheduler.plan()
        return commit(self.scheduler, self.runner, self.runner.launch(plan, requests))


class OverlappedLoop:
    """The next step is planned and launched before the last one's verdicts are read.

    A stop is seen one step late; the surplus row's verdict is dropped by the scheduler.
    """

    def __init__(self, scheduler: Scheduler, runner: StepRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._in_flight: Pending | None = None

    def advance(self, requests: Mapping[str, Request]) -> Done | None:
        """None after a first launch, when nothing can be committed yet."""
        if self._in_flight is not None and self.runner.must_wait(self._in_flight.plan):
            waited_for, self._in_flight = self._in_flight, None
            return commit(self.scheduler, self.runner, waited_for)
        plan = self.scheduler.plan()
        before, self._in_flight = self._in_flight, self.runner.launch(plan, requests)
        return None if before is None else commit(self.scheduler, self.runner, before)
