"""Entry: what the scheduler remembers of one request besides the request's own counts."""

from collections.abc import Sequence

from aspire.request import Request


class Entry:
    """Lives from add() to the end of the request, across preemptions.

    `known`: the request's num_known when blocks were last sized for it, that is in this plan while it runs: cheaper to
    read, and the same in a whole plan.
    `has_full_row` turns true when a full row that reaches the end of the known tokens is planned: from then on the
    request decodes. `pending`: the most tokens that rows in flight may still emit (their verdicts are not committed).
    `awaits`: the last copy that its blocks wait for (offload.py).
    """

    __slots__ = (
        "awaits",
        "capacity",
        "draft_margin",
        "has_free_drafts",
        "has_full_row",
        "known",
        "order",
        "pending",
        "refused_at",
        "request",
        "reserved",
        "slot",
        "turn",
    )

    def __init__(self, request: Request, order: tuple[int, int]) -> None:
        self.request = request
        self.order = order  # (priority, arrival): smaller goes first and is preempted last
        self.has_full_row = False
        self.pending = 0
        self.turn = 0  # number of the row that last gave it what the cadence decided: the smallest is served first
        self.slot = -1  # the running request's slot
        self.known = 0
        self.reserved = 0  # tokens its blocks were last sized for: known and the lookahead
        self.capacity = 0  # tokens its blocks hold
        self.awaits = 0
        self.draft_margin: float | None = None
        self.has_free_drafts = False  # drafts no row has run: their KV is missing, so a verification comes next
        self.refused_at = -1  # free blocks at the last refused admission: no use to try again with as few

    @property
    def num_remaining(self) -> int:
        """Prefill tokens not planned yet."""
        return self.request.num_known - self.request.num_computed

    @property
    def surely_ends(self) -> bool:
        """The rows in flight emit at least one token, and that is the last one allowed."""
        return self.pending > 0 and self.known + 1 >= self.request.max_total

    def room(self, draft_limit: int) -> int:
        """Drafts it may still make in this round: a verification of them must not pass `max_total`."""
        request = self.request
        num_drafted = request.num_drafted
        left = request.max_total - self.known - self.pending - num_drafted - 1
        room = draft_limit - num_drafted if draft_limit - num_drafted < left else left
        return room if room > 0 else 0

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Known token ids at positions [start, stop); costs O(stop - start)."""
        prompt, output = self.request.prompt_token_ids, self.request.output_token_ids
        split = len(prompt)
        if stop <= split:
            return prompt[start:stop]
        return prompt[start:split] + output[max(start - split, 0):stop - split]

    def reset(self) -> None:
        """After a preemption: nothing is computed, drafts are lost, tokens stay."""
        request = self.request
        request.counters.num_wasted += request.num_drafted
        request.num_computed = request.num_drafted = 0
        self.has_full_row = self.has_free_drafts = False
        self.known = self.reserved = self.capacity = self.awaits = 0
        self.draft_margin = None
        self.refused_at = -1
        if not request.output_token_ids:
            request.prompt_logprobs = None
