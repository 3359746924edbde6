"""The values that pass between the scheduler and the rest of the engine: Row, StepPlan, Verdict.

A plan is frozen, picklable and without tensors: it is also what other ranks receive.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class RowKind(Enum):
    """How a row reads the KV cache. FULL attends to everything; SPARSE to the selection, the sinks and the tail."""

    FULL = "full"
    SPARSE = "sparse"


class Row(NamedTuple):
    """One request's part of a step. A named tuple: a step makes one per request, and it is built in a third of the
    time of a frozen dataclass.

    FULL rows cover positions [start, start + num_tokens): prefill, a chunk of it, plain decoding (1 token) or
    verification (num_drafted + 1 tokens). SPARSE rows hold one token.

    A row whose `tokens` is empty is a decoding row: the device knows its inputs (last token, then drafts) and its
    true position; `start` is then the host's view of it, a lower bound under the overlapped loop.
    """

    request_id: str
    slot: int
    kind: RowKind
    start: int
    num_tokens: int
    num_drafted: int  # FULL: drafts this row verifies. SPARSE: drafts made before this one.
    samples: bool  # the row reaches the end of the known tokens, so its last logits pick a token
    tokens: tuple[int, ...] = ()  # prefill inputs, given by the host
    emits: bool = True  # the pick is output (FULL rows that sample; SPARSE rows of a lossy policy)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a slot: the runtime must set up the slot's sampling state and counts.

    `num_known` counts prompt plus committed output (more than the prompt after a preemption).
    """

    slot: int
    request_id: str
    num_known: int


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Blocks `blocks` become entries [first, first + len(blocks)) of the slot's block table."""

    slot: int
    first: int
    blocks: tuple[int, ...]


class Direction(Enum):
    """Which way a block's content goes."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


class BlockCopy(NamedTuple):
    """The content of a block goes to a block of host memory, or comes back from there."""

    block: int
    host_block: int
    direction: Direction


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The decision of one step. `rows` is ordered: decoding rows first, then prefill chunks. `copies` take effect in
    their order, after all earlier steps and before this one's rows."""

    step: int
    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    block_updates: tuple[BlockUpdate, ...] = ()
    preempted: tuple[str, ...] = ()
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])

    @property
    def prefills(self) -> bool:
        """Whether some row holds tokens of a prompt: the last one does then."""
        return bool(self.rows) and bool(self.rows[-1].tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's log probability of one emitted token, and of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None  # 1 = the most likely token


class Verdict(NamedTuple):
    """What one row of a step produced; same order as `StepPlan.rows`. A named tuple for the time it takes to make one.

    tokens: what the row emitted: accepted drafts, then the target's own pick (the bonus token). Empty for a row
        that drafts and for an unfinished prefill.
    num_drafted: drafts this row verified; the accepted ones number `len(tokens) - 1`.
    draft_margin: for a drafting row, perturbed best minus second-best logit of its pick: small means unsure.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    num_drafted: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    draft_margin: float | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def num_accepted(self) -> int:
        return max(0, len(self.tokens) - 1)
