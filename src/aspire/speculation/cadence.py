"""When a request verifies. A cadence is frozen data plus one predicate over the decoding requests of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from aspire.speculation.acceptance import AcceptanceEstimator
from aspire.speculation.cost import CostModel

MAX_DRAFTS = 64


class Decision(Enum):
    DRAFT = "draft"
    VERIFY = "verify"
    WAIT = "wait"  # lock step: peers are not ready


class Drafting(NamedTuple):
    """What a cadence may know of one decoding request (host's view; may lag one step under the overlapped loop).
    A named tuple, as Row is, for the time it takes to make one."""

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
    most_tokens: float = float("inf")  # of a step without prefill that the engine has a fast way for


class Cadence(Protocol):
    """draft_limit: the most drafts per round; 0 means plain decoding."""

    @property
    def draft_limit(self) -> int: ...

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        """One decision per request, in order. DRAFT only where room > 0."""
        ...


@dataclass(frozen=True, slots=True)
class Always:
    """Plain decoding: every row verifies, with nothing drafted."""

    @property
    def draft_limit(self) -> int:
        return 0

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        return [Decision.VERIFY] * len(requests)


@dataclass(frozen=True, slots=True)
class NeverVerify:
    """Every row drafts and its pick is output: policies without verification. Asks for drafts whatever the room."""

    @property
    def draft_limit(self) -> int:
        return 0

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        return [Decision.DRAFT] * len(requests)


@dataclass(frozen=True, slots=True)
class Lockstep:
    """All draft, all verify: together when the most drafted request reaches `length` or nobody may draft; a request
    without room waits for its peers."""

    length: int

    def __post_init__(self) -> None:
        check_length("lockstep.length", self.length)

    @property
    def draft_limit(self) -> int:
        return self.length

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        most = max((r.num_drafted for r in requests), default=0)
        if most >= self.length or all(r.room == 0 for r in requests):
            return [Decision.VERIFY] * len(requests)
        return [Decision.DRAFT if r.room > 0 else Decision.WAIT for r in requests]


@dataclass(frozen=True, slots=True)
class Staggered:
    """Every request verifies each `length` + 1 steps, at a phase given by its order, so that about one in length + 1
    verifies at any step (as arXiv 2512.01278 does)."""

    length: int

    def __post_init__(self) -> None:
        check_length("staggered.length", self.length)

    @property
    def draft_limit(self) -> int:
        return self.length

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        period = self.length + 1
        return [Decision.VERIFY if r.room == 0 or (outlook.step + r.order) % period == 0 else Decision.DRAFT
                for r in requests]


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The published rule (arXiv 2609.17943): verify when d >= argmax over g of
    [(1 - alpha^(g+1)) / (1 - alpha)] / (1 + c g), c = T_draft / T_verify, recomputed each step, where both times are
    those of a batch in which every slot holds a copy of the request. `first_length`: drafts of a first round."""

    limit: int = 16
    first_length: int = 3

    def __post_init__(self) -> None:
        check_length("adaptive.limit", self.limit)
        check_length("adaptive.first_length", self.first_length)

    @property
    def draft_limit(self) -> int:
        return self.limit

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        return [self._decide(r, len(requests), outlook) for r in requests]

    def _decide(self, request: Drafting, batch: int, outlook: Outlook) -> Decision:
        if request.room == 0:
            return Decision.VERIFY
        if request.num_drafted == 0:
            return Decision.DRAFT
        if outlook.acceptance.rounds(request.request_id) == 0:
            return Decision.VERIFY if request.num_drafted >= self.first_length else Decision.DRAFT
        d, cost = request.num_drafted, outlook.cost
        alpha = outlook.acceptance.survival(request.request_id, 1)[0]
        draft = cost.step_seconds(batch, batch * cost.kv.sparse_bytes(request.context, d))
        verify = cost.step_seconds(batch * (d + 1), batch * cost.kv.full_bytes(request.context + d))
        c = draft / verify
        # The ratio rises to one peak and falls, so d has reached the argmax once a further draft does not raise it.
        tokens = (1.0 - alpha ** (d + 1)) / (1.0 - alpha) if alpha < 1.0 else d + 1.0
        gains = alpha ** (d + 1) * (1.0 + c * d) > tokens * c
        return Decision.DRAFT if gains else Decision.VERIFY


def check_length(field: str, length: int) -> None:
    """Raises ValueError unless `length` is a usable draft length."""
    if not 1 <= length <= MAX_DRAFTS:
        raise ValueError(f"{field} must be in [1, {MAX_DRAFTS}], got {length!r}")
