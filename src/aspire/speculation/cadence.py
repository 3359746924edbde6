"""When a request verifies. A cadence is frozen data plus one predicate over the decoding requests of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from aspire.speculation.acceptance import AcceptanceEstimator
from aspire.speculation.cost import CostModel


class Decision(Enum):
    DRAFT = "draft"
    VERIFY = "verify"
    WAIT = "wait"  # lock step: peers are not ready


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a cadence may know of one decoding request (host's view; may lag one step under the overlapped loop)."""

    request_id: str
    num_drafted: int
    room: int  # drafts it may still make in this round (limits, max_tokens); 0: must verify or wait
    context: int  # known tokens
    order: int  # a small stable number for staggering
    draft_margin: float | None = None  # of its last draft


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a cadence may consult besides the requests."""

    acceptance: AcceptanceEstimator
    cost: CostModel
    prefill_tokens: int = 0  # tokens of prefill planned into the step besides
    step: int = 0


class Cadence(Protocol):
    """draft_limit: the most drafts per round; 0 means plain decoding."""

    @property
    def draft_limit(self) -> int: ...

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        """One decision per request, in order. DRAFT only where room > 0."""
        ...
