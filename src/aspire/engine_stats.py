"""EngineStats: what an engine tells about itself between two steps. Counters only grow; gauges are as of now.

Standard library only; knows nothing of servers or metric names.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RequestView:
    """One live request as an onlooker sees it. num_drafted: drafts waiting for their verification right now."""

    request_id: str
    state: Literal["waiting", "prefill", "draft", "verify"]
    num_prompt: int
    num_computed: int
    num_output: int
    num_drafted: int = 0
    acceptance_rate: float | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Totals count since the engine started; every field has a neutral default."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # of the KV cache
    num_blocks_used: int = 0  # held by requests; cached but free blocks do not count
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    num_prefix_hits: int = 0  # of these, found
    num_preemptions: int = 0
    num_offloaded: int = 0  # KV blocks copied to host memory
    num_restored: int = 0  # KV blocks that came back from there
    num_host_blocks: int = 0
    num_host_blocks_used: int = 0
    num_drafts: int = 0  # verifications that had drafts to check
    num_draft_tokens: int = 0  # drafts that reached a verdict
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # [i]: verifications that accepted draft i (from 0)
    draft_lengths: tuple[int, ...] = ()  # [k]: verifications of k drafts
    num_verifying: int = 0  # verification rows in the last step
    num_drafting: int = 0  # sparse rows in the last step
    step_seconds: float | None = None  # of the last step
    predicted_step_seconds: float | None = None  # the cost model's price of that step
    requests: tuple[RequestView, ...] = ()  # running first, then waiting

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks held by requests, in [0, 1]."""
        return self.num_blocks_used / self.num_blocks if self.num_blocks else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over verified drafts; None before the first."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None
