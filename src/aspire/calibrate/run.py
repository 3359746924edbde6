"""calibrate(): times steps, searches refresh layers and budget, returns the Calibration."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from aspire.bench.acceptance import Cell, Lab, Tally
from aspire.bench.selections import VARIANTS, Variant, layers_at, variant_policy
from aspire.build import calibration_key, kv_reads
from aspire.calibrate.agreement import Agreement, ListWatch
from aspire.calibrate.forecast import Forecast, Target, forecast, plain_rate, smooth_survival, with_overhead
from aspire.calibrate.search import Candidate, Search, places_of
from aspire.calibrate.timing import Group, StepCost, fit_groups, group_steps, scoring_layers
from aspire.progress import Progress, no_progress
from aspire.speculation.cadence import Lockstep
from aspire.speculation.calibration import Calibration
from aspire.speculation.policy import PRESETS, Overrides, Policy

MAX_LAYERS = 6
NUM_PLACES = 7
LEAST_TOKENS = 24  # output tokens per request that a candidate is measured on, at least
EXPECTED_CANDIDATES = 14
SEARCH_SHARE = 0.6  # of the time that timing leaves, at most, for the search; the rest for measuring its best again
FINALISTS = 3
MORE = 1.5  # times the tokens of the search that make another measurement worth its time
TIMING_SHARE = 0.35  # of the allowed time, at most, for timing steps


@dataclass(frozen=True, slots=True)
class Plan:
    """budgets: to choose from; the search starts at the first. seconds: when to stop measuring; at least one
    candidate is measured."""

    target: Target
    budgets: tuple[int, ...]
    temperature: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One candidate's run and what follows from it."""

    candidate: Candidate
    cell: Cell
    forecast: Forecast

    def describe(self) -> dict[str, Any]:
        cell = self.cell
        return {"refresh": list(self.candidate.refresh), "budget": self.candidate.budget, "alpha": cell.alpha,
                "interval": list(cell.interval), "trials": cell.trials, "kv_share": cell.kv_share,
                "tokens_per_verification": cell.tokens_per_verification, "draft_length": self.forecast.draft_length,
                "tokens_per_second": self.forecast.tokens_per_second}


@dataclass(frozen=True, slots=True)
class Outcome:
    """step_error: mean relative error of the fitted step times. complete: the search ended by itself. agreement: of
    layers about what to read, if there was time to look."""

    calibration: Calibration
    measured: tuple[Measured, ...]
    step_error: float
    per_scoring: float
    seconds: float
    complete: bool
    agreement: Agreement | None


class Calibrator:
    """One calibration run on a lab whose contexts are the sample."""

    def __init__(self, lab: Lab, plan: Plan, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.lab = lab
        self.plan = plan
        self.measured: list[Measured] = []
        self._clock = clock
        self._begun = clock()
        self._deadline = self._begun + plan.seconds
        self._longest = 0.0
        self._tokens = LEAST_TOKENS
        self._agreement: Agreement | None = None
        self._captured = lab.loaded.device.type == "cuda" and lab.options.get("cuda_graphs", True)

    def run(self, progress: Progress = no_progress) -> Outcome:
        """Time steps, search, measure the best again, decide. Raises ValueError when the steps cannot be told apart
        (see `fit`)."""
        self.lab.prefill()
        with progress("Timing steps", 1) as advance:
            steps = self.time_steps()
            advance(1)
        with progress("Measuring selections", EXPECTED_CANDIDATES) as advance:
            search = self.search(steps, advance)
        with progress("Measuring the best again", FINALISTS) as advance:
            self.confirm(search, steps, advance)
        chosen = next(one for one in self.measured if one.candidate == search.best)
        cost, spec = steps.cost, self.lab.loaded.spec
        calibration = Calibration(
            key=calibration_key(self.lab.loaded.config, spec, self.lab.loaded.device), batch=self.plan.target.batch,
            context=self.plan.target.context, refresh=chosen.candidate.refresh, budget=chosen.candidate.budget,
            base=cost.base, weights=cost.weights, per_token=cost.per_token, per_byte=cost.per_byte,
            draft_length=chosen.forecast.draft_length, tokens_per_second=chosen.forecast.tokens_per_second,
            plain_tokens_per_second=plain_rate(self.plan.target, cost),
            measured=tuple({**one.describe(), "final": one.candidate in search.final} for one in self.measured),
            agreement=None if self._agreement is None else asdict(self._agreement))
        overhead = self._overhead(self._policy(chosen.candidate), steps)
        return Outcome(replace(calibration, base=cost.base + overhead), tuple(self.measured), steps.error,
                       steps.per_scoring, self._clock() - self._begun, not search.out_of_time,
                       self._agreement)

    # -- step times ----------------------------------------------------------------------------------------------

    def time_steps(self) -> StepCost:
        """Drafting and verifying steps of full attention, of lists without refresh and of the default preset, at
        several numbers of requests and two context lengths. Where every layer has a list, their agreement is seen."""
        lab = self.lab
        drafts = lab.work.draft_length if lab.loaded.device.type == "cuda" else min(4, lab.work.draft_length)
        groups: list[Group] = []
        for name in ("full", "refresh-0", "aspire"):
            policy = variant_policy(VARIANTS[name], lab.loaded.spec, Lockstep(drafts), self._changes(name))
            engine = lab.engine(policy)
            watch = ListWatch(engine, _listed(policy)) if name == "refresh-0" else None
            for contexts in self._samples():
                if len(groups) >= 8 and self._clock() - self._begun > TIMING_SHARE * self.plan.seconds:
                    break
                looks = watch if len(contexts) == len(lab.work.contexts) else None
                tally = lab.run(engine, contexts, 0.0, until=partial(_rounds_done, watch=looks))
                groups += group_steps(tally.steps, policy.layers, captured=self._captured)
            self._agreement = watch.result() if watch is not None else self._agreement
        return fit_groups(groups, kv_reads(lab.loaded.config, lab.loaded.spec, policy))

    def _changes(self, name: str) -> Overrides:
        return Overrides(budget=self.plan.budgets[0]) if VARIANTS[name].budgets else Overrides()

    def _samples(self) -> list[Sequence[Sequence[int]]]:
        """Sets of contexts to decode: one, some and all of them, whole and cut to a quarter."""
        contexts = self.lab.work.contexts
        counts = sorted({1, max(1, len(contexts) // 4), len(contexts)}, reverse=True)
        return [[context[: len(context) // part] for context in contexts[:count]]
                for count in counts for part in (1, 4)]

    # -- selections ----------------------------------------------------------------------------------------------

    def search(self, steps: StepCost, advance: Callable[[int], None]) -> Search:
        """Measure candidates until nothing pays or the time is over. The preset's own layers come first, then of each
        size the sets whose layers agree best."""
        spec = self.lab.loaded.spec
        seeing = [layer for layer in range(spec.num_layers) if not spec.windows or spec.windows[layer] is None]
        preset, agreement = layers_at(PRESETS["aspire"].depths, seeing), self._agreement
        now = self._clock()
        self._deadline = now + SEARCH_SHARE * max(0.0, self._begun + self.plan.seconds - now)

        def promise(candidate: Candidate) -> float:
            return agreement.forecast(candidate.refresh) if agreement is not None else 0.0

        search = Search(partial(self._measure_in_time, steps=steps, advance=advance))
        budget = self.plan.budgets[0]
        search.try_all([Candidate(preset, budget)])
        search.grow(Candidate((), budget), places_of(seeing, NUM_PLACES), most=MAX_LAYERS,
                    promise=None if agreement is None else promise)
        search.thin(search.best)
        search.vary_budget(search.best, self.plan.budgets)
        return search

    def confirm(self, search: Search, steps: StepCost, advance: Callable[[int], None]) -> None:
        """Measure the best again on as many tokens as the time is enough for, if those are more than before."""
        self._deadline = self._begun + self.plan.seconds
        left = self._deadline - self._clock()
        tokens = min(self.lab.work.tokens, int(0.9 * self._tokens * left / FINALISTS / self._longest))
        if tokens < MORE * self._tokens:
            return
        self._longest *= tokens / self._tokens
        self._tokens = tokens
        search.confirm(partial(self._measure_in_time, steps=steps, advance=advance), FINALISTS)

    def _measure_in_time(self, candidate: Candidate, *, steps: StepCost,
                         advance: Callable[[int], None]) -> float | None:
        """Tokens per second to expect; None when the time is over, unless nothing was measured yet."""
        if self.measured and self._clock() + self._longest > self._deadline:
            return None
        found = self._measure(candidate, steps)
        advance(1)
        return found.forecast.tokens_per_second

    def _measure(self, candidate: Candidate, steps: StepCost) -> Measured:
        begun = self._clock()
        policy = self._policy(candidate)
        cell, = self.lab.measure("calibration", policy, (self.plan.temperature,), budget=candidate.budget,
                                 report=lambda cell: None, tokens=self._tokens)
        spent = self._clock() - begun
        self._longest = max(self._longest, spent)
        if not self.measured:  # the first tells how many tokens each of the others may take
            left = self._deadline - self._clock()
            affordable = self._tokens * left / EXPECTED_CANDIDATES / max(spent, 1e-6)
            self._tokens = int(min(self.lab.work.tokens, max(LEAST_TOKENS, affordable)))
            self._longest *= max(1.0, self._tokens / LEAST_TOKENS)
        survival = smooth_survival(cell.accepted, cell.reached)
        reads = kv_reads(self.lab.loaded.config, self.lab.loaded.spec, policy)
        cost = with_overhead(replace(steps.cost, kv=reads), self._overhead(policy, steps))
        found = Measured(candidate, cell, forecast(survival, self.plan.target, cost))
        self.measured = [one for one in self.measured if one.candidate != candidate] + [found]
        return found

    def _policy(self, candidate: Candidate) -> Policy:
        return self.lab.policy(Variant("aspire"), Overrides(refresh=candidate.refresh, budget=candidate.budget))

    def _overhead(self, policy: Policy, steps: StepCost) -> float:
        """Seconds of scoring in the mean step. Without graphs, few steps verify: those that draft count."""
        return steps.per_scoring * scoring_layers(policy.layers, "draft", captured=self._captured)


def _listed(policy: Policy) -> list[int]:
    """The layers that keep a list of their own."""
    return [layer for layer, index in enumerate(policy.layers.reads) if index is not None]


def _rounds_done(tally: Tally, *, watch: ListWatch | None) -> bool:
    """Enough steps of each kind: a few verifications of every request."""
    if watch is not None:
        watch.look(tally)
    return min(len(rounds) for rounds in tally.rounds.values()) >= 5
