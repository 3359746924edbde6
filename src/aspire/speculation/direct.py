"""The system-rate cadence: each request drafts on while its expected gain exceeds the price of its own GPU time.

With R the batch's attainable rate in tokens a second, a round of g drafts by a request whose draft step costs s and
whose verification costs v (marginal seconds) is worth (E(g) - R (g s + v(g))) / (g + 1) tokens a step, and the batch
rate is highest when every request maximises its own worth at the R that results (Dinkelbach's method for a ratio of
sums; it decouples the requests). R follows from the very targets chosen, so it is renewed at every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from aspire.speculation.cadence import Decision, Drafting, Outlook, check_length
from aspire.speculation.cost import CostModel

RATE_TOLERANCE = 0.02  # relative change of R that makes a target stale
PROBE_EVERY = 48  # plain steps after which a request that stopped speculating tries again
MAX_PASSES = 6


@dataclass(slots=True)
class _Target:
    """What a request means to do in its running round; sums over requests give the batch's rate."""

    rounds: int
    rate: float
    length: int
    threshold: float  # draft on while the next draft's survival exceeds this
    survival: Sequence[float]
    tokens: float  # emitted per step
    seconds: float  # marginal, per step
    rows: float  # row tokens per step


class Direct:
    """draft_limit: most drafts per round. min_draft: fewest; 0 lets speculation turn itself off, None means 0 under
    a fitted cost model and 1 under an assumed one. first_draft: length of a request's first round, spread over
    [first_draft, first_draft + 4) by its order so that a batch that starts together does not verify together.

    Not frozen: it remembers each request's target between steps, which never changes a decision but by RATE_TOLERANCE.
    """

    __slots__ = ("_draft_limit", "_first_draft", "_min_draft", "_targets")

    def __init__(self, draft_limit: int = 16, *, min_draft: int | None = None, first_draft: int = 4) -> None:
        check_length("direct.draft_limit", draft_limit)
        check_length("direct.first_draft", first_draft)
        if min_draft is not None and not 0 <= min_draft <= draft_limit:
            raise ValueError(f"direct.min_draft must be in [0, {draft_limit}] or None, got {min_draft!r}")
        self._draft_limit = draft_limit
        self._min_draft = min_draft
        self._first_draft = first_draft
        self._targets: dict[str, _Target] = {}

    def __repr__(self) -> str:
        return f"Direct({self._draft_limit}, min_draft={self._min_draft}, first_draft={self._first_draft})"

    @property
    def draft_limit(self) -> int:
        return self._draft_limit

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        targets = self._renew(requests, outlook)
        confidence = outlook.acceptance.confidence
        low = self._fewest(outlook.cost)
        decisions = []
        for request, target in zip(requests, targets, strict=True):
            d = request.num_drafted
            if request.room == 0:
                decisions.append(Decision.VERIFY)
            elif d < low or (d < target.length and (d == 0 or target.rounds == 0)):
                decisions.append(Decision.DRAFT)
            elif d == 0 or target.rounds == 0 or d >= len(target.survival):
                decisions.append(Decision.VERIFY)
            else:
                worth = confidence(request.request_id) * target.survival[d]
                decisions.append(Decision.DRAFT if worth > target.threshold else Decision.VERIFY)
        return self._spread(requests, decisions, targets, outlook)

    def _renew(self, requests: Sequence[Drafting], outlook: Outlook) -> list[_Target]:
        """A target for each request at a rate that agrees with all of them."""
        known, rounds, cost = self._targets, outlook.acceptance.rounds, outlook.cost
        targets = [known.get(r.request_id) for r in requests]
        rate = self._system_rate(targets, cost)
        token_price = self._token_price(targets, cost, outlook.prefill_tokens)
        for _ in range(MAX_PASSES):
            stale = [i for i, (r, t) in enumerate(zip(requests, targets, strict=True))
                     if t is None or abs(t.rate - rate) > RATE_TOLERANCE * rate or t.rounds != rounds(r.request_id)]
            if not stale:
                break
            for i in stale:
                targets[i] = self._aim(requests[i], rate, token_price, outlook)
            rate = self._system_rate(targets, cost)
            token_price = self._token_price(targets, cost, outlook.prefill_tokens)
        result = [t for t in targets if t is not None]
        assert len(result) == len(requests), "every request has a target after a pass"
        self._targets = {r.request_id: t for r, t in zip(requests, result, strict=True)}
        return result

    def _aim(self, request: Drafting, rate: float, token_price: float, outlook: Outlook) -> _Target:
        """The length of highest worth at this rate, found by walking up to the peak (E is concave)."""
        cost, acceptance = outlook.cost, outlook.acceptance
        rounds = acceptance.rounds(request.request_id)
        survival = acceptance.survival(request.request_id, self._draft_limit)
        read_draft = cost.per_byte * cost.kv.sparse_bytes(request.context, 2)
        read_full = cost.per_byte * cost.kv.full_bytes(request.context)
        draft = read_draft + 2.0 * token_price  # its own step's token, and one more in the verification
        verify = read_full + token_price
        length = low = self._fewest(cost)
        tokens = 1.0 + sum(survival[:low])
        worth = (tokens - rate * (low * draft + verify)) / (low + 1)
        for g in range(low + 1, self._draft_limit + 1):
            more = tokens + survival[g - 1]
            value = (more - rate * (g * draft + verify)) / (g + 1)
            if value <= worth:
                break
            length, worth, tokens = g, value, more
        if length == 0 and rounds % PROBE_EVERY == PROBE_EVERY - 1:
            length = 1
        if rounds == 0 and length > 0:
            length = min(self._draft_limit, max(low, self._first_draft + request.order % 4))
            tokens = 1.0 + sum(survival[:length])
        steps = length + 1
        return _Target(rounds, rate, length, rate * draft + worth, survival, tokens / steps,
                       (length * read_draft + read_full) / steps, (2 * length + 1) / steps)

    def _fewest(self, cost: CostModel) -> int:
        if self._min_draft is not None:
            return self._min_draft
        return 0 if cost.fitted else 1

    @staticmethod
    def _system_rate(targets: "Sequence[_Target | None]", cost: CostModel) -> float:
        """Tokens a second of the batch if everyone keeps to its target; 0 without targets (any length then pays)."""
        tokens = seconds = rows = 0.0
        for target in targets:
            if target is not None:
                tokens += target.tokens
                seconds += target.seconds
                rows += target.rows
        if tokens == 0.0:
            return 0.0
        return tokens / (cost.base + max(cost.weights, cost.per_token * rows) + seconds)

    @staticmethod
    def _token_price(targets: "Sequence[_Target | None]", cost: CostModel, prefill_tokens: int) -> float:
        """Seconds that one more row token costs: nothing well below the knee, `per_token` above it."""
        if cost.weights == 0.0:
            return cost.per_token
        rows = sum(target.rows for target in targets if target is not None) + prefill_tokens
        return cost.per_token * min(1.0, max(0.0, (rows / cost.knee - 0.8) / 0.4))

    def _spread(self, requests: Sequence[Drafting], decisions: list[Decision], targets: list[_Target],
                outlook: Outlook) -> list[Decision]:
        """Puts verifications off where a step would pass the knee for nothing: the batch's mean is below it."""
        knee = outlook.cost.knee
        tokens = outlook.prefill_tokens
        for request, decision in zip(requests, decisions, strict=True):
            tokens += request.num_drafted + 1 if decision is Decision.VERIFY else 1
        if tokens <= knee or outlook.prefill_tokens + sum(t.rows for t in targets) > knee:
            return decisions
        # Cheapest first: those whose next draft is most likely to be accepted lose least by drafting it.
        movable = [i for i, (r, d) in enumerate(zip(requests, decisions, strict=True))
                   if d is Decision.VERIFY and r.room > 0 and r.num_drafted > 0]
        movable.sort(key=lambda i: -targets[i].survival[min(requests[i].num_drafted, self._draft_limit - 1)])
        for i in movable:
            if tokens <= knee:
                break
            decisions[i] = Decision.DRAFT
            tokens -= requests[i].num_drafted
        return decisions
