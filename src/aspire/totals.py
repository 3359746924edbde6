"""Totals: an observer that adds up steps, and turns the sums and the scheduler's state into an EngineStats snapshot."""

from typing import Literal

from aspire.engine_stats import EngineStats, RequestView
from aspire.request import Request
from aspire.schedule.scheduler import Scheduler
from aspire.stats import StepStats


class Totals:
    """Counts since the engine started; reading them costs O(requests)."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_offloaded = 0
        self.num_restored = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._accepted_per_position: list[int] = []
        self._draft_lengths: list[int] = []
        self._last: StepStats | None = None

    def count_prefix(self, request: Request) -> None:
        """A request ended: what its prompt found in the prefix cache."""
        self.num_prefix_queries += request.num_prompt
        self.num_prefix_hits += request.counters.num_cached_tokens

    def on_step(self, stats: StepStats) -> None:
        self._last = stats
        self.num_steps += 1
        self.num_preemptions += len(stats.preempted)
        self.num_offloaded += stats.offloaded
        self.num_restored += stats.restored
        for _, kind, num_tokens, num_drafted, num_accepted, num_emitted in stats.rows:
            self.num_output_tokens += num_emitted
            if kind == "prefill":
                self.num_prompt_tokens += num_tokens
            elif kind == "verify":
                self._count_verification(num_drafted, num_accepted)

    def close(self) -> None:
        """Nothing is held."""

    def snapshot(self, scheduler: Scheduler) -> EngineStats:
        rows = self._last.rows if self._last else ()
        kinds = {row.request_id: row.kind for row in rows}
        running = [_view(request, kinds.get(request.request_id, "waiting")) for request in scheduler.running]
        waiting = [_view(request, "waiting") for request in scheduler.waiting]
        pool, host = scheduler.pool, scheduler.offload.host if scheduler.offload else None
        return EngineStats(
            num_running=scheduler.num_running, num_waiting=scheduler.num_waiting, num_blocks=pool.num_blocks,
            num_blocks_used=pool.num_blocks - pool.num_free, num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens, num_output_tokens=self.num_output_tokens,
            num_prefix_queries=self.num_prefix_queries, num_prefix_hits=self.num_prefix_hits,
            num_preemptions=self.num_preemptions, num_offloaded=self.num_offloaded, num_restored=self.num_restored,
            num_host_blocks=host.num_blocks if host else 0, num_host_blocks_used=host.num_used if host else 0,
            num_drafts=self.num_drafts, num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens, accepted_per_position=tuple(self._accepted_per_position),
            draft_lengths=tuple(self._draft_lengths), num_verifying=sum(row.kind == "verify" for row in rows),
            num_drafting=sum(row.kind == "draft" for row in rows),
            step_seconds=self._last.duration if self._last else None, requests=(*running, *waiting),
        )

    def _count_verification(self, num_drafted: int, num_accepted: int) -> None:
        lengths, positions = self._draft_lengths, self._accepted_per_position
        lengths.extend([0] * (num_drafted + 1 - len(lengths)))
        lengths[num_drafted] += 1
        if num_drafted:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafted
            self.num_accepted_tokens += num_accepted
            positions.extend([0] * (num_drafted - len(positions)))
            for position in range(num_accepted):
                positions[position] += 1


def _view(request: Request, state: Literal["waiting", "prefill", "draft", "verify"]) -> RequestView:
    return RequestView(request.request_id, state, request.num_prompt, request.num_computed,
                       len(request.output_token_ids), request.num_drafted, request.counters.acceptance_rate)
