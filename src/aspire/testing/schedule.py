"""Levers over a schedule without a model: scripted cadences, and a device that answers plans by script.

The device keeps a KV memory of its own in which every cell says whose prefix it holds and whether full attention wrote
it, so that a wrong block table, a wrong prefix hit or a draft taken for truth fails at the row that reads it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from aspire.request import Request
from aspire.schedule.plan import BlockCopy, Direction, Row, RowKind, StepPlan, Verdict
from aspire.schedule.scheduler import Scheduler
from aspire.speculation.cadence import Decision, Drafting, Outlook


@dataclass(frozen=True, slots=True)
class ScriptedCadence:
    """Request of order o gets entry (step + o) of the script, which repeats; it verifies where it may not draft."""

    draft_limit: int
    script: tuple[Decision, ...]

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        wishes = [self.script[(outlook.step + request.order) % len(self.script)] for request in requests]
        return [_possible(wish, request) for wish, request in zip(wishes, requests, strict=True)]


@dataclass(frozen=True, slots=True)
class RandomCadence:
    """Any legal decision, from a pure function of (seed, step, request). `wait` is the chance to wait, at even steps
    only: all waiting twice in a row would be a scheduler's bug."""

    draft_limit: int
    seed: int
    draft: float = 0.7
    wait: float = 0.1

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        return [self._decide(request, outlook.step) for request in requests]

    def _decide(self, request: Drafting, step: int) -> Decision:
        random = Random(f"{self.seed}/{step}/{request.request_id}")
        if step % 2 == 0 and random.random() < self.wait:
            return Decision.WAIT
        return _possible(Decision.DRAFT if random.random() < self.draft else Decision.VERIFY, request)


def _possible(wish: Decision, request: Drafting) -> Decision:
    return Decision.VERIFY if wish is Decision.DRAFT and request.room == 0 else wish


@dataclass(slots=True)
class _Slot:
    request_id: str
    num_known: int
    table: list[int] = field(default_factory=list)
    num_drafted: int = 0
    has_full_row: bool = False


class ScriptedDevice:
    """Stands in for the runner: `run(plan)` returns the plan's verdicts, from a script, and checks what rows read.

    token(request_id, position): the token at that position, prompt included: the plan's prefill inputs must equal it.
    accepted(request_id, position, num_drafted): how many drafts a verification starting there accepts; it is cut to
    [0, num_drafted]. `num_drafts_made`,
    `num_restored` (blocks) and `rows_run` count for the tests.
    """

    def __init__(self, block_size: int, token: Callable[[str, int], int],
                 accepted: Callable[[str, int, int], int]) -> None:
        self._block_size = block_size
        self._token = token
        self._accepted = accepted
        self._slots: dict[int, _Slot] = {}
        self._memory: dict[int, tuple[object, bool]] = {}  # cell -> (prefix it holds, written by full attention)
        self._host: dict[int, list[tuple[object, bool] | None]] = {}  # host block -> what its cells hold
        self._prefixes: dict[str, list[int]] = {}
        self.num_restored = 0
        self.num_drafts_made = 0
        self.rows_run = 0

    def run(self, plan: StepPlan) -> tuple[Verdict, ...]:
        """The verdicts of a plan. AssertionError where a row would read or write KV that is not its own."""
        for admission in plan.admissions:
            self._slots[admission.slot] = _Slot(admission.request_id, admission.num_known)
        for update in plan.block_updates:
            assert self._slots[update.slot].request_id not in plan.preempted, "blocks for a preempted request"
            table = self._slots[update.slot].table
            assert update.first == len(table), f"slot {update.slot}: blocks from {update.first}, it has {len(table)}"
            table.extend(update.blocks)
        for copy in plan.copies:
            self._copy(copy)
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows of one slot"
        return tuple(self._run_row(row) for row in plan.rows)

    def _copy(self, copy: BlockCopy) -> None:
        first = copy.block * self._block_size
        cells = range(first, first + self._block_size)
        if copy.direction is Direction.TO_HOST:
            self._host[copy.host_block] = [self._memory.get(cell) for cell in cells]
        else:
            self.num_restored += 1
            for cell, content in zip(cells, self._host[copy.host_block], strict=True):
                assert content is not None, f"host block {copy.host_block} holds nothing"
                assert content[1], f"host block {copy.host_block} holds {content}, no full row wrote that"
                self._memory[cell] = content

    def _run_row(self, row: Row) -> Verdict:
        slot = self._slots[row.slot]
        assert slot.request_id == row.request_id, f"slot {row.slot} is {slot.request_id!r}, not {row.request_id!r}"
        self.rows_run += 1
        if row.tokens:
            return self._prefill(slot, row)
        assert row.num_drafted == slot.num_drafted, f"{row.request_id!r}: {slot.num_drafted} drafts on the device"
        assert row.start <= slot.num_known + slot.num_drafted - 1, "the host is ahead of the device"
        if row.kind is RowKind.FULL:
            return self._verify(slot, row)
        return self._draft(slot, row)

    def _prefill(self, slot: _Slot, row: Row) -> Verdict:
        name, stop = row.request_id, row.start + row.num_tokens
        assert list(row.tokens) == [self._token(name, p) for p in range(row.start, stop)], f"{name!r}: wrong inputs"
        assert row.samples == row.emits == (stop == slot.num_known), f"{name!r}: samples must mean the end"
        self._read(slot, row.start)
        self._write(slot, row.start, stop, trusted=True)
        if not row.samples:
            return Verdict(name)
        slot.has_full_row = True
        slot.num_known += 1
        return Verdict(name, (self._token(name, stop),))

    def _verify(self, slot: _Slot, row: Row) -> Verdict:
        name, known = row.request_id, slot.num_known
        assert row.num_tokens == row.num_drafted + 1, f"{name!r}: a verification is whole"
        num_accepted = max(0, min(self._accepted(name, known, row.num_drafted), row.num_drafted))
        self._read(slot, known - 1)
        self._write(slot, known - 1, known + num_accepted, trusted=True)
        self._write(slot, known + num_accepted, known + row.num_drafted, trusted=False)
        slot.num_known += num_accepted + 1
        slot.num_drafted = 0
        return Verdict(name, tuple(self._token(name, known + i) for i in range(num_accepted + 1)), row.num_drafted)

    def _draft(self, slot: _Slot, row: Row) -> Verdict:
        name, position = row.request_id, slot.num_known + slot.num_drafted - 1
        assert row.num_tokens == 1, "a sparse row holds one token"
        assert slot.has_full_row, f"{name!r} drafts before a full row scored"
        self._write(slot, position, position + 1, trusted=False)
        if row.emits:
            slot.num_known += 1
            return Verdict(name, (self._token(name, position + 1),))
        self._read(slot, slot.num_known - 1)
        slot.num_drafted += 1
        self.num_drafts_made += 1
        return Verdict(name, draft_margin=float(position))

    def _cell(self, slot: _Slot, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        assert block < len(slot.table), f"{slot.request_id!r}: position {position} is outside of its blocks"
        return slot.table[block] * self._block_size + offset

    def _prefix(self, request_id: str, position: int) -> int:
        """Identity of the tokens up to and including `position`."""
        prefixes = self._prefixes.setdefault(request_id, [])
        while len(prefixes) <= position:
            prefixes.append(hash((prefixes[-1] if prefixes else 0, self._token(request_id, len(prefixes)))))
        return prefixes[position]

    def _read(self, slot: _Slot, stop: int) -> None:
        for position in range(stop):
            found = self._memory.get(self._cell(slot, position))
            expected = (self._prefix(slot.request_id, position), True)
            assert found == expected, f"{slot.request_id!r}: position {position} holds {found}, not {expected}"

    def _write(self, slot: _Slot, start: int, stop: int, *, trusted: bool) -> None:
        for position in range(start, stop):
            content = self._prefix(slot.request_id, position) if trusted else ("draft", slot.request_id)
            self._memory[self._cell(slot, position)] = (content, trusted)


def drive(scheduler: Scheduler, device: ScriptedDevice, *, lag: int = 0, max_steps: int = 10_000,
          after: Callable[[StepPlan], None] | None = None) -> list[Request]:
    """Run until all requests ended, with commits `lag` (0 or 1) plans behind; checks the books after every call.

    after(plan): called after each step's last commit, for aborts, additions and assertions.
    """
    finished: list[Request] = []
    flying: deque[tuple[StepPlan, tuple[Verdict, ...]]] = deque()
    for _ in range(max_steps):
        if not scheduler.has_unfinished and not flying:
            scheduler.check()
            return finished
        if scheduler.has_unfinished:
            plan = scheduler.plan()
            scheduler.check()
            flying.append((plan, device.run(plan)))
        while flying and (len(flying) > lag or not scheduler.has_unfinished):
            finished += scheduler.commit(*flying.popleft())
            scheduler.check()
        if after is not None:
            after(plan)
    raise AssertionError(f"unfinished after {max_steps} steps: {scheduler.running} {scheduler.waiting}")
