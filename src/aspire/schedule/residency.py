"""Residency: which requests hold a slot and blocks, and who waits for them: admission, growth, preemption.

Knows nothing of rows, drafts or token budgets beyond the number it is given.
"""

import heapq
from bisect import insort
from collections.abc import Callable, Container
from operator import attrgetter

from aspire.schedule.blocks import BlockPool
from aspire.schedule.entry import Entry
from aspire.schedule.offload import Offload
from aspire.schedule.plan import Admission, BlockCopy, BlockUpdate

_by_order = attrgetter("order")


class Residency:
    """`waiting` is sorted by order (priority, then arrival), `running` is in order of admission.

    A running request holds blocks for min(num_known + lookahead, max_total) tokens as of the last grow() or admit();
    a waiting one holds nothing, but may have a claim in host memory. offload: None recomputes what was preempted.
    """

    def __init__(self, pool: BlockPool, num_slots: int, lookahead: int, *, offload: Offload | None,
                 clock: Callable[[], float]) -> None:
        self.pool = pool
        self.offload = offload
        self.waiting: list[Entry] = []
        self.running: list[Entry] = []
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots))  # a heap: the lowest slot first
        self._lookahead = lookahead
        self._clock = clock

    def enqueue(self, entry: Entry) -> None:
        insort(self.waiting, entry, key=_by_order)

    def grow(self) -> tuple[list[BlockUpdate], tuple[str, ...]]:
        """Renew the reserve of every running request; returns the new table entries and who was preempted for them.

        When blocks run out, the last in order steps back, be it the one that grows: an older request never pays for
        a younger one, so the oldest always gets on.
        """
        if self.offload is not None:
            self.offload.begin_step()
        updates: list[BlockUpdate] = []
        preempted: list[str] = []
        for entry in tuple(self.running):
            known = entry.request.num_known
            if known == entry.known:
                continue
            reserved = self._target(entry, known)
            while reserved > entry.capacity and entry.request.slot is not None:  # a victim has lost its slot
                first = self.pool.num_held(entry.request.request_id)
                blocks = self.pool.grow(entry.request.request_id, reserved)
                if blocks is not None:
                    entry.capacity += len(blocks) * self.pool.block_size
                    updates.append(BlockUpdate(entry.slot, first, blocks))
                    continue
                victim = max(self.running, key=_by_order)
                updates = [update for update in updates if update.slot != victim.slot]
                preempted.append(victim.request.request_id)
                self._preempt(victim)
            if entry.request.slot is not None:
                entry.known, entry.reserved = known, reserved
        return updates, tuple(preempted)

    def admit(self, budget: int, unfinished: Container[str]) -> tuple[list[Admission], list[BlockUpdate]]:
        """Seat waiting requests in order while slots, blocks and `budget` tokens of prefill backlog last.

        Nobody passes a request that waits for blocks. Only a follower whose leader (one of `unfinished`) still
        computes the prompt that both share is passed by others.
        """
        admissions: list[Admission] = []
        updates: list[BlockUpdate] = []
        backlog = sum(entry.num_remaining for entry in self.running if not entry.has_full_row)
        index = 0
        while index < len(self.waiting) and self._free_slots and backlog < budget:
            entry = self.waiting[index]
            if self._awaits_leader(entry, unfinished):
                index += 1
                continue
            update = self._try_seat(entry)
            if update is None:
                break
            del self.waiting[index]
            self.running.append(entry)
            updates.append(update)
            admissions.append(Admission(update.slot, entry.request.request_id, entry.request.num_known))
            backlog += entry.num_remaining
        return admissions, updates

    def remove(self, entry: Entry) -> None:
        """Forget a request, running or waiting; what it held is free again."""
        name = entry.request.request_id
        if entry.request.slot is None:
            self.waiting.remove(entry)
            if self.offload is not None:
                self.offload.host.disclaim(name)
            return
        if self.offload is not None:
            self.offload.keep(self.pool.contents(name))
        self._unseat(entry)

    def is_there(self, entry: Entry) -> bool:
        """Whether the copies that a running request's blocks wait for are taken to be through."""
        return self.offload is None or self.offload.is_through(entry.awaits)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """This plan's copies to and from host memory."""
        return () if self.offload is None else self.offload.take_copies()

    def check(self) -> None:
        """AssertionError unless reserves are exact, waiting requests own nothing and slots are one to one."""
        self.pool.check()
        if self.offload is not None:
            self.offload.check([entry.request.request_id for entry in self.waiting])
        for entry in self.running:
            request, held = entry.request, self.pool.num_held(entry.request.request_id)
            assert held == self.pool.blocks_for(entry.reserved), f"{request.request_id!r}: {held} blocks held"
            assert entry.capacity == held * self.pool.block_size, f"{request.request_id!r}: wrong capacity"
            assert entry.reserved == self._target(entry, entry.known), f"{request.request_id!r}: wrong reserve"
            num_written = request.num_known + max(0, request.num_drafted - 1)
            # Free drafts are not written before the next plan, which grows the reserve first.
            assert entry.has_free_drafts or num_written <= entry.reserved, f"{request.request_id!r} overruns"
        for entry in self.waiting:
            request = entry.request
            assert not self.pool.num_held(request.request_id), f"{request.request_id!r} waits and owns blocks"
            assert (request.slot, request.num_computed, request.num_drafted) == (None, 0, 0), "a waiting one has counts"
        slots = [entry.slot for entry in self.running]
        assert slots == [entry.request.slot for entry in self.running], "a request and its entry disagree on the slot"
        assert sorted([*slots, *self._free_slots]) == list(range(self._num_slots)), "a slot is lost or shared"
        orders = [entry.order for entry in self.waiting]
        assert orders == sorted(orders), "the queue is out of order"

    def _target(self, entry: Entry, known: int) -> int:
        return min(known + self._lookahead, entry.request.max_total)

    def _awaits_leader(self, entry: Entry, unfinished: Container[str]) -> bool:
        """A leader with output has its prompt computed and registered, so the follower can share the blocks."""
        leader = entry.request.leader
        return (leader is not None and self.pool.enable_prefix_caching and not leader.output_token_ids
                and leader.request_id in unfinished)

    def _try_seat(self, entry: Entry) -> BlockUpdate | None:
        request, known = entry.request, entry.request.num_known
        assert entry.pending == 0, f"{request.request_id!r} has tokens in flight"
        if self.pool.num_free <= entry.refused_at:
            return None
        # Prompt logprobs need the logits of every prompt token, so nothing may come from the cache.
        uses_cache = request.params.prompt_logprobs is None or bool(request.output_token_ids)
        token_ids = entry.tokens(0, known) if uses_cache else ()
        offload = self.offload
        allocation = self.pool.allocate(request.request_id, token_ids, self._target(entry, known),
                                        elsewhere=() if offload is None else offload.host)
        if allocation is None:
            entry.refused_at = self.pool.num_free
            return None
        if offload is not None:
            offload.restore(request.request_id, allocation.missing)
            entry.awaits = offload.last_copy(allocation.blocks)
        entry.known, entry.reserved = known, self._target(entry, known)
        entry.capacity = len(allocation.blocks) * self.pool.block_size
        request.slot = entry.slot = heapq.heappop(self._free_slots)
        request.num_computed = allocation.num_cached_tokens
        if request.counters.first_scheduled_time is None:
            request.counters.first_scheduled_time = self._clock()
            request.counters.num_cached_tokens = allocation.num_cached_tokens
        return BlockUpdate(entry.slot, 0, allocation.blocks)

    def _preempt(self, entry: Entry) -> None:
        """Go on later: the tokens stay, everything else is given back, its KV for the host to keep or to be recomputed.
        Its order puts it before later arrivals."""
        name = entry.request.request_id
        if self.offload is not None:
            self.offload.save(name, self.pool.contents(name))
        self._unseat(entry)
        entry.reset()
        entry.request.counters.num_preempted += 1
        self.enqueue(entry)

    def _unseat(self, entry: Entry) -> None:
        self.running.remove(entry)
        self.pool.release(entry.request.request_id)
        heapq.heappush(self._free_slots, entry.slot)
        entry.request.slot, entry.slot = None, -1
