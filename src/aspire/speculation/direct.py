"""The system-rate cadence: each request drafts on while its expected gain exceeds the price of its own GPU time.

A round of g drafts by a request whose draft step costs s and whose verification costs v (marginal seconds) is worth
(E(g) - R (g s + v(g))) / (g + 1) tokens a step, where R, in tokens a second, prices the time. Two prices are right for
two ends:
- R = the batch's attainable rate gives the most tokens a second now (Dinkelbach's method for a ratio of sums; it
  decouples the requests). It starves requests with long contexts, whose tokens cost more than R pays: the tokens
  missing now are made later, in a batch that has drained.
- R = the request's own best rate E(g) / (g s + v(g) + (g + 1) b), b being its share of a step's fixed time, makes each
  request's tokens in the least time of the device, hence all given outputs soonest under a full batch.
The cadence prices with a geometric mean of the two that leans to the second (docs/LOG.md has the figures).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from aspire.speculation.cadence import Decision, Drafting, Outlook, check_length
from aspire.speculation.cost import CostModel

DRAFT, VERIFY = Decision.DRAFT, Decision.VERIFY  # bound once: an enum's look-up is slow
RATE_TOLERANCE = 0.02  # relative change of R that makes a target stale
PROBE_EVERY = 48  # steps after which a request that stopped speculating makes one draft to see
MAX_PASSES = 6


@dataclass(slots=True, eq=False)
class _Target:
    """What a request means to do in its running round; sums over requests give the batch's rate."""

    rounds: int
    context: int
    rate: float  # the batch's when it was chosen
    length: int
    own_length: int  # the one of its own best rate
    threshold: float  # draft on while the next draft's survival exceeds this
    survival: Sequence[float]
    read_draft: float  # marginal seconds of a draft step, and of a verification
    read_full: float
    tokens: float  # emitted per step
    seconds: float  # marginal, per step
    rows: float  # row tokens per step


class Direct:
    """draft_limit: most drafts per round. min_draft: fewest; 0 lets speculation turn itself off, None means 0 under
    a fitted cost model and 1 under an assumed one. first_draft: length of a request's first round, spread over
    [first_draft, first_draft + 4) by its order so that a batch that starts together does not verify together.
    own_weight: of the request's own rate in the price, see above; 0: the batch's rate alone.

    Not frozen: it remembers each request's target and R between steps, which spares time and changes no decision by
    more than RATE_TOLERANCE does.
    """

    __slots__ = ("_cost", "_draft_limit", "_first_draft", "_min_draft", "_num_measured", "_own_weight", "_rate",
                 "_rows", "_share", "_targets", "_token_price")

    def __init__(self, draft_limit: int = 16, *, min_draft: int | None = None, first_draft: int = 3,
                 own_weight: float = 0.75) -> None:
        check_length("direct.draft_limit", draft_limit)
        check_length("direct.first_draft", first_draft)
        if min_draft is not None and not 0 <= min_draft <= draft_limit:
            raise ValueError(f"direct.min_draft must be in [0, {draft_limit}] or None, got {min_draft!r}")
        if not 0.0 <= own_weight <= 1.0:
            raise ValueError(f"direct.own_weight must be in [0, 1], got {own_weight!r}")
        self._draft_limit = draft_limit
        self._min_draft = min_draft
        self._first_draft = first_draft
        self._own_weight = own_weight
        self._targets: dict[str, _Target] = {}
        self._cost: CostModel | None = None  # the one the targets were chosen under
        self._rate = 0.0  # of the batch if everyone keeps to its target
        self._rows = 0.0  # row tokens of its mean step
        self._share = 0.0  # a request's share of a step's fixed seconds
        self._token_price = 0.0  # seconds that one more row token costs
        self._num_measured = 0

    def __repr__(self) -> str:
        return f"Direct({self._draft_limit}, min_draft={self._min_draft}, first_draft={self._first_draft})"

    @property
    def draft_limit(self) -> int:
        return self._draft_limit

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        targets = self._renew(requests, outlook)
        confidence, low = outlook.acceptance.confidence, self._fewest(outlook.cost)
        decisions = []
        tokens = outlook.prefill_tokens
        for request, target in zip(requests, targets, strict=True):
            d = request.num_drafted
            if request.room == 0:
                drafts = False
            elif d == 0 or d < low or target.rounds == 0:
                drafts = d < target.length or (d == 0 and (outlook.step + 5 * request.order) % PROBE_EVERY == 0)
            else:
                drafts = target.survival[d] * confidence(request.request_id) > target.threshold
            if drafts:
                tokens += 1
                decisions.append(DRAFT)
            else:
                tokens += d + 1
                decisions.append(VERIFY)
        if tokens > outlook.cost.knee >= self._rows + outlook.prefill_tokens:
            self._spread(requests, decisions, targets, tokens - outlook.cost.knee)
        return decisions

    def _fewest(self, cost: CostModel) -> int:
        if self._min_draft is not None:
            return self._min_draft
        return 0 if cost.fitted else 1

    def _renew(self, requests: Sequence[Drafting], outlook: Outlook) -> list[_Target]:
        """A target for each request, at a rate that agrees with all of them. Afterwards exactly they are known."""
        if outlook.cost is not self._cost:
            self._cost, self._targets, self._rate = outlook.cost, {}, 0.0
            self._measure([], outlook)
        known, rounds = self._targets, outlook.acceptance.rounds
        for _ in range(MAX_PASSES):
            least, most = self._rate * (1.0 - RATE_TOLERANCE), self._rate * (1.0 + RATE_TOLERANCE)
            targets: list[_Target] = []
            num_new = 0
            for request in requests:
                target = known.get(request.request_id)
                # A verdict is known by the first or, with a lagging host, the second draft of the next round.
                if target is None or not least <= target.rate <= most or (
                        request.num_drafted <= 2 and target.rounds != rounds(request.request_id)):
                    target = known[request.request_id] = self._aim(request, outlook)
                    num_new += 1
                targets.append(target)
            if len(known) > len(requests):
                known = self._targets = {r.request_id: known[r.request_id] for r in requests}
            if num_new or len(requests) != self._num_measured:
                self._measure(targets, outlook)
            if least <= self._rate <= most:
                break
        return targets

    def _aim(self, request: Drafting, outlook: Outlook) -> _Target:
        """The length of highest worth at the present prices. Both searches climb from the last answer: E is concave
        and time linear in the length, so there is one peak."""
        rounds = outlook.acceptance.rounds(request.request_id)
        survival = outlook.acceptance.survival(request.request_id, self._draft_limit)
        last = self._targets.get(request.request_id)
        context, read_draft, read_full = self._read_times(request, last, outlook.cost)
        draft = read_draft + 2.0 * self._token_price  # its own step's token, and one more in the verification
        verify = read_full + self._token_price
        low, share = self._fewest(outlook.cost), self._share
        gain = list(accumulate(survival, initial=1.0))  # expected tokens by length
        start = (low, low) if last is None else (max(low, last.own_length), max(low, last.length))
        own_length, own_rate = _climb(
            start[0], low, self._draft_limit, lambda g: gain[g] / (g * draft + verify + (g + 1) * share))
        price = own_rate if self._rate == 0.0 else (
            own_rate ** self._own_weight * self._rate ** (1.0 - self._own_weight))
        length, worth = _climb(
            start[1], low, self._draft_limit, lambda g: (gain[g] - price * (g * draft + verify)) / (g + 1))
        if rounds == 0 and length > 0:
            length = min(self._draft_limit, max(low, self._first_draft + request.order % 4))
        steps = length + 1
        return _Target(rounds, context, self._rate, length, own_length, price * draft + worth, (*survival, 0.0),
                       read_draft, read_full, gain[length] / steps, (length * read_draft + read_full) / steps,
                       (2 * length + 1) / steps)

    @staticmethod
    def _read_times(request: Drafting, last: _Target | None, cost: CostModel) -> tuple[int, float, float]:
        """Context, and marginal seconds of a draft and of a verification: those of the last target if still true."""
        if last is not None and 0 <= request.context - last.context <= last.context // 64:
            return last.context, last.read_draft, last.read_full
        context = request.context
        return (context, cost.per_byte * cost.kv.mean_sparse_bytes(context),
                cost.per_byte * cost.kv.full_bytes(context))

    def _measure(self, targets: list[_Target], outlook: Outlook) -> None:
        """What the batch does on average if everyone keeps to its target. A token is free well below the knee and
        costs `per_token` above it; without targets yet, weights and prices are those of an empty step."""
        cost = outlook.cost
        tokens = seconds = rows = 0.0
        for target in targets:
            tokens += target.tokens
            seconds += target.seconds
            rows += target.rows
        self._num_measured = len(targets)
        self._rows = rows
        if cost.weights == 0.0:
            self._token_price = cost.per_token
        else:
            load = (rows + outlook.prefill_tokens) / cost.knee
            self._token_price = cost.per_token * min(1.0, max(0.0, (load - 0.8) / 0.4))
        fixed = cost.base + max(cost.weights, cost.per_token * rows)
        self._share = max(0.0, fixed - self._token_price * rows) / max(1, len(targets))
        self._rate = tokens / (fixed + seconds) if targets else 0.0

    def _spread(self, requests: Sequence[Drafting], decisions: list[Decision], targets: list[_Target],
                excess: float) -> None:
        """Puts verifications off where a step would pass the knee by `excess` tokens though the mean step does not.
        Those whose next draft is most likely to be accepted go first: they lose least by drafting it."""
        movable = [i for i, (r, d) in enumerate(zip(requests, decisions, strict=True))
                   if d is VERIFY and r.room > 0 and r.num_drafted > 0]
        movable.sort(key=lambda i: -targets[i].survival[min(requests[i].num_drafted, self._draft_limit - 1)])
        for i in movable:
            if excess <= 0:
                break
            decisions[i] = DRAFT
            excess -= requests[i].num_drafted


def _climb(start: int, low: int, high: int, value: Callable[[int], float]) -> tuple[int, float]:
    """The peak of a function with one peak on [low, high], and its value there."""
    best, peak = start, value(start)
    for step in (1, -1):
        while low <= best + step <= high and (there := value(best + step)) > peak:
            best, peak = best + step, there
    return best, peak
