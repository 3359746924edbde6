"""Scheduler: which rows make a step, and what a step's verdicts change. The hot path of the host: counts only, no
token values (prefill inputs aside), no tensors, O(1) work per decoding request and step.

Rows, token budget and verdicts live here; slots and blocks in residency.py; when to verify is the cadence's business.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from aspire.request import FinishReason, Request
from aspire.schedule.blocks import BlockPool
from aspire.schedule.commit import append_prompt_logprobs, append_tokens, check_verdict, count_verification, max_emitted
from aspire.schedule.config import SchedulerConfig
from aspire.schedule.entry import Entry
from aspire.schedule.limits import check_size
from aspire.schedule.offload import Offload
from aspire.schedule.plan import Admission, Row, RowKind, StepPlan, Verdict
from aspire.schedule.residency import Residency
from aspire.speculation.acceptance import AcceptanceEstimator
from aspire.speculation.cadence import Cadence, Decision, Drafting, Outlook
from aspire.speculation.cost import CostModel

_by_turn = attrgetter("turn")

# Bound once: looking a member up in its enum at every use costs a third of a plan.
DRAFT, VERIFY, WAIT = Decision.DRAFT, Decision.VERIFY, Decision.WAIT
FULL, SPARSE = RowKind.FULL, RowKind.SPARSE
_new = tuple.__new__  # makes named tuples in half the time of a call of theirs, which goes through Python


class Scheduler:
    """plan() decides a step, commit() applies its verdicts. plan() may run once more before the commit of the step
    before (overlapped loop); verdicts of requests that ended or were preempted meanwhile are handled."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, cadence: Cadence, *, acceptance: AcceptanceEstimator,
                 cost: CostModel, offload: Offload | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        assert pool.block_size == config.block_size, "scheduler and pool disagree on the block size"
        assert config.lookahead > cadence.draft_limit, "the reserve must hold one whole round"
        self.config = config
        self.pool = pool
        self.cadence = cadence
        self.acceptance = acceptance
        self.cost = cost
        self.offload = offload
        self._clock = clock
        # A verification takes one token more than it has drafts, and is never split.
        self._draft_limit = min(cadence.draft_limit, config.max_num_batched_tokens - 1)
        self._entries: dict[str, Entry] = {}
        self._residency = Residency(pool, config.max_num_seqs, config.lookahead, offload=offload, clock=clock)
        self._in_flight: deque[tuple[StepPlan, list[Entry]]] = deque()
        self._arrivals = self._turns = self._step = 0
        self._was_empty = self._prefill_starved = False

    @property
    def has_unfinished(self) -> bool:
        return bool(self._entries)

    @property
    def num_running(self) -> int:
        return len(self._residency.running)

    @property
    def num_waiting(self) -> int:
        return len(self._residency.waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(entry.request for entry in self._residency.running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        return tuple(entry.request for entry in self._residency.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. ValueError when it could never run; nothing is changed then."""
        if request.request_id in self._entries:
            raise ValueError(f"request_id must be unique among unfinished requests, got {request.request_id!r}")
        check_size(request, self.pool, max_model_len=self.config.max_model_len)
        if not request.counters.arrival_time:
            request.counters.arrival_time = self._clock()
        entry = Entry(request, (request.priority, self._arrivals))
        self._arrivals += 1
        self._entries[request.request_id] = entry
        self._residency.enqueue(entry)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None when it is unknown or has ended. Verdicts still in flight for it are dropped."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        entry.request.finish_reason = FinishReason.ABORT
        entry.request.counters.finished_time = self._clock()
        self._remove(entry)
        return entry.request

    def plan(self) -> StepPlan:
        """Decide the next step. AssertionError when a second plan in a row is empty although there is work."""
        assert len(self._in_flight) <= 1, "two steps in flight: commit first"
        budget, seats = self.config.max_num_batched_tokens, self._residency
        updates, preempted = seats.grow()
        admissions: list[Admission] = []
        if not preempted:  # who was just preempted may have tokens in flight, and the pool is full anyway
            admissions, tables = seats.admit(budget, self._entries)
            updates += tables
        beginning = [entry for entry in seats.running if not entry.has_full_row]
        prefilling = [entry for entry in beginning if seats.is_there(entry)]
        decoding = [entry for entry in seats.running if entry.has_full_row and not entry.surely_ends]
        if self._prefill_starved:  # decoding took the whole budget last time: prefill goes first, with half of it
            prefill = self._plan_prefill(prefilling, (budget + 1) // 2)
            num_prefill = sum(row.num_tokens for row in prefill)
            rows = self._plan_decoding(decoding, budget - num_prefill, num_prefill)
        else:
            backlog = sum(entry.num_remaining for entry in prefilling)
            rows = self._plan_decoding(decoding, budget, min(backlog, max(0, budget - len(decoding))))
            num_left = budget - sum(row.num_tokens for row in rows) if prefilling else 0
            prefill = self._plan_prefill(prefilling, num_left)
        self._prefill_starved = bool(prefilling) and not prefill
        rows += prefill
        if not rows:  # who waits for copies does so lest the others wait with it; alone it need not
            rows = self._plan_prefill(beginning, budget)
        plan = StepPlan(self._step, tuple(rows), tuple(admissions), tuple(updates), preempted, seats.take_copies())
        self._step += 1
        assert rows or not (self._was_empty and self._entries), "two empty plans in a row with unfinished work"
        self._was_empty = not rows
        self._in_flight.append((plan, [self._entries[row.request_id] for row in rows]))
        return plan

    def commit(self, plan: StepPlan, verdicts: Sequence[Verdict]) -> list[Request]:
        """Apply one verdict per row of the oldest plan in flight; returns the requests that ended, slots freed."""
        expected, entries = self._in_flight.popleft()
        assert plan.step == expected.step, f"commit of step {plan.step}, step {expected.step} is the oldest in flight"
        assert len(verdicts) == len(plan.rows), f"{len(verdicts)} verdicts for {len(plan.rows)} rows"
        now = self._clock()
        finished: list[Request] = []
        for entry, row, verdict in zip(entries, plan.rows, verdicts, strict=True):
            if not (row.emits or row.tokens):
                self._commit_draft(entry, row, verdict)
                continue
            check_verdict(row, verdict)
            if entry.request.is_finished:
                entry.request.counters.num_wasted += verdict.num_drafted if row.kind is FULL else 0
                continue
            self._commit_row(entry, row, verdict, now)
            if entry.request.is_finished:
                self._remove(entry)
                finished.append(entry.request)
        return finished

    def add_free_drafts(self, request_id: str, count: int) -> int:
        """Drafts that no row made (a grammar left no choice) join the request's; it verifies next. How many fit: none
        while rows of the request are in flight or its prompt is being computed."""
        entry = self._entries[request_id]
        request = entry.request
        if not entry.has_full_row or entry.pending or request.slot is None:
            return 0
        left = request.max_total - request.num_known - request.num_drafted - 1
        fitting = max(0, min(count, self._draft_limit - request.num_drafted, left))
        request.num_drafted += fitting
        entry.has_free_drafts = entry.has_free_drafts or fitting > 0
        return fitting

    def check(self) -> None:
        """Prove the books. AssertionError with the culprit otherwise; for tests and idle time."""
        self._residency.check()
        names = sorted(request.request_id for request in (*self.running, *self.waiting))
        assert names == sorted(self._entries), f"unfinished are {sorted(self._entries)}, kept are {names}"
        assert self._entries or self.pool.num_free == self.pool.num_blocks, "idle, but blocks are held"

    def _plan_prefill(self, entries: list[Entry], budget: int) -> list[Row]:
        rows: list[Row] = []
        for entry in entries:
            if budget <= 0:
                break
            request, num_known = entry.request, entry.known
            start = request.num_computed
            stop = min(start + budget, num_known)
            row = Row(request.request_id, entry.slot, FULL, start, stop - start, 0, stop == num_known,
                      tuple(entry.tokens(start, stop)), stop == num_known)
            entry.has_full_row = row.samples
            self._turns = entry.turn = self._turns + 1
            entry.pending += max_emitted(row)
            request.num_computed = stop
            # Findable from now on: whoever reads these blocks does so in a later step.
            self.pool.register(request.request_id, stop, entry.tokens)
            budget -= stop - start
            rows.append(row)
        return rows

    def _plan_decoding(self, entries: list[Entry], budget: int, num_prefill: int) -> list[Row]:
        """What the cadence wants, as far as the budget goes; whose turn is longest ago comes first. A verification
        that does not fit is dropped whole and drafts on instead if it may."""
        entries.sort(key=_by_turn)
        rooms = [entry.room(self._draft_limit) for entry in entries]
        rows: list[Row] = []
        dropped: list[Entry] = []
        turn, decode = self._turns, self._decode_row
        for entry, room, decision in zip(entries, rooms, self._decide(entries, rooms, num_prefill), strict=True):
            if entry.has_free_drafts:
                decision = VERIFY
            elif decision is WAIT:
                continue
            cost = 1 if decision is DRAFT else entry.request.num_drafted + 1
            if cost <= budget:
                budget -= cost
                turn += 1
                entry.turn = turn
                rows.append(decode(entry, decision))
            elif decision is VERIFY and room and not entry.has_free_drafts:
                dropped.append(entry)
        self._turns = turn
        rows += [decode(entry, DRAFT) for entry in dropped[:budget]]
        return rows

    def _decide(self, entries: list[Entry], rooms: list[int], num_prefill: int) -> list[Decision]:
        """The cadence's wish for every decoding request."""
        if self.config.sparse_emits or not entries:
            return [DRAFT] * len(entries)
        requests = []
        for entry, room in zip(entries, rooms, strict=True):
            request = entry.request
            requests.append(_new(Drafting, (
                request.request_id, request.num_drafted, room, entry.known, entry.slot, entry.draft_margin)))
        return self.cadence.decide(requests, Outlook(self.acceptance, self.cost, num_prefill, self._step,
                                                     self.config.most_decode_tokens))

    def _decode_row(self, entry: Entry, decision: Decision) -> Row:
        request = entry.request
        name, slot, num_drafted = request.request_id, entry.slot, request.num_drafted
        last = entry.known - 1
        if self.config.sparse_emits:
            entry.pending += 1
            return Row(name, slot, SPARSE, last, 1, 0, True)
        if decision is DRAFT:
            assert num_drafted < self._draft_limit, f"{name!r} has no room for another draft"
            request.num_drafted = num_drafted + 1
            return _new(Row, (name, slot, SPARSE, last + num_drafted, 1, num_drafted, True, (), False))
        request.num_drafted = 0
        entry.draft_margin = None
        entry.has_free_drafts = False
        entry.pending += num_drafted + 1
        return _new(Row, (name, slot, FULL, last, num_drafted + 1, num_drafted, True, (), True))

    def _commit_draft(self, entry: Entry, row: Row, verdict: Verdict) -> None:
        """A row that drafted: nothing is emitted. Most rows of a step are of this kind."""
        name, tokens, _, _, margin, _ = verdict
        assert name == row.request_id, f"verdict of {name!r} for a row of {row.request_id!r}"
        assert not tokens, f"{name!r} drafted, but its verdict emits"
        request = entry.request
        if entry.slot < 0 or request.finish_reason is not None:  # preempted or ended meanwhile
            return
        self.acceptance.note_draft(name, row.num_drafted + 1, margin)
        if request.num_drafted:  # no verification was planned since
            entry.draft_margin = margin

    def _commit_row(self, entry: Entry, row: Row, verdict: Verdict, now: float) -> None:
        request = entry.request
        runs = request.slot is not None  # False: preempted meanwhile; its tokens count, its KV is gone
        is_full = row.kind is FULL
        entry.pending -= max_emitted(row)
        num_kept = append_tokens(request, verdict, now)
        if is_full and not row.tokens:
            count_verification(request, verdict, num_kept)
            self.acceptance.observe(request.request_id, verdict.num_drafted, verdict.num_accepted)
        if not runs:
            return
        if row.tokens:
            append_prompt_logprobs(request, verdict)
            return
        request.num_computed += num_kept
        if is_full:  # what sparse rows wrote may not be shared
            self.pool.register(request.request_id, request.num_computed, entry.tokens)

    def _remove(self, entry: Entry) -> None:
        """The request has ended: nothing of it stays here, and drafts without a verdict were for nothing."""
        request = entry.request
        self._residency.remove(entry)
        request.counters.num_wasted += request.num_drafted
        request.num_drafted = 0
        del self._entries[request.request_id]
        self.acceptance.forget(request.request_id)
