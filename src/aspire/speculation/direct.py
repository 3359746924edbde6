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

from collections.abc import Sequence
from dataclasses import dataclass

from aspire.speculation.cadence import Decision, Drafting, Outlook, check_length
from aspire.speculation.cost import CostModel

DRAFT, VERIFY = Decision.DRAFT, Decision.VERIFY  # bound once: an enum's look-up is slow
RATE_TOLERANCE = 0.1  # relative change of R that makes the targets of running rounds stale
MOST_STALE = 8  # targets of running rounds that a step renews for that reason
PROBE_EVERY = 48  # steps after which a request that stopped speculating makes one draft to see
SETTLED = 4  # verdicts after which a request aims at every other one
PASSES = 6  # over a batch that nothing is known of yet


@dataclass(slots=True, eq=False)
class _Target:
    """What a request means to do in its running round; sums over requests give the batch's rate."""

    due: int  # verdicts from which on it is chosen anew
    epoch: int  # of the prices that it was chosen under
    context: int
    length: int
    threshold: float  # draft on while the next draft's survival exceeds this
    renewal: float  # by so much more where the next draft renews lists
    survival: Sequence[float]
    read_draft: float  # marginal seconds of a draft step that renews nothing
    read_renewal: float  # what a renewal adds
    read_full: float  # of a verification
    tokens: float  # emitted per step
    seconds: float  # marginal, per step
    rows: float  # row tokens per step


class Direct:
    """draft_limit: most drafts per round. min_draft: fewest; 0 lets speculation turn itself off, None means 0 under
    a fitted cost model and 1 under an assumed one. first_spread: first rounds are of as many different lengths, chosen
    by the request's order, so that a batch that starts together does not verify together. own_weight: of the request's
    own rate in the price, see above; 0: the batch's rate alone.

    Not frozen: it remembers each request's target and R between steps. A request aims anew at each of its verdicts;
    what others do changes its price by a few percent a round at most.
    """

    __slots__ = ("_cost", "_draft_limit", "_epoch", "_epoch_rate", "_first_spread", "_min_draft", "_own_weight",
                 "_rate", "_rows", "_seconds", "_share", "_targets", "_token_price", "_tokens")

    def __init__(self, draft_limit: int = 16, *, min_draft: int | None = None, first_spread: int = 4,
                 own_weight: float = 0.9) -> None:
        check_length("direct.draft_limit", draft_limit)
        check_length("direct.first_spread", first_spread)
        if min_draft is not None and not 0 <= min_draft <= draft_limit:
            raise ValueError(f"direct.min_draft must be in [0, {draft_limit}] or None, got {min_draft!r}")
        if not 0.0 <= own_weight <= 1.0:
            raise ValueError(f"direct.own_weight must be in [0, 1], got {own_weight!r}")
        self._draft_limit = draft_limit
        self._min_draft = min_draft
        self._first_spread = first_spread
        self._own_weight = own_weight
        self._targets: dict[str, _Target] = {}
        self._cost: CostModel | None = None  # the one the targets were chosen under
        self._epoch = 0  # counts changes of the prices
        self._epoch_rate = 0.0  # R at the last one
        self._rate = 0.0  # of the batch if everyone keeps to its target
        self._tokens = self._seconds = self._rows = 0.0  # sums over the targets; rows: tokens of the mean step
        self._share = 0.0  # a request's share of a step's fixed seconds
        self._token_price = 0.0  # seconds that one more row token costs

    def __repr__(self) -> str:
        return f"Direct({self._draft_limit}, min_draft={self._min_draft})"

    @property
    def draft_limit(self) -> int:
        return self._draft_limit

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        self._follow(requests, outlook)
        cost, step, targets, epoch = outlook.cost, outlook.step, self._targets, self._epoch
        confidence, rounds = outlook.acceptance.confidence, outlook.acceptance.rounds
        low, every = self._fewest(cost), cost.kv.refresh_every
        spare = MOST_STALE
        decisions = []
        tokens = outlook.prefill_tokens
        for request in requests:
            name, d, room, _, order, _ = request
            target = targets.get(name)
            # A verdict is known by the first or, with a lagging host, the second draft of the next round.
            if target is None or (d < 2 and rounds(name) >= target.due):
                target = self._aim(request, outlook)
            elif target.epoch != epoch and spare:
                spare -= 1
                target = self._aim(request, outlook)
            if room == 0:
                drafts = False
            elif d < low or target.due == 1 or d == 0:  # in a first round lengths are spread
                drafts = d < target.length or (d == 0 and (step + 5 * order) % PROBE_EVERY == 0)
            else:
                trust = confidence(name)
                drafts = trust >= 1.0 and d < target.length
                if not drafts:
                    price = target.threshold if (d + 1) % every else target.threshold + target.renewal
                    drafts = target.survival[d] * trust > price
            if drafts:
                tokens += 1
                decisions.append(DRAFT)
            else:
                tokens += d + 1
                decisions.append(VERIFY)
        if len(targets) > len(requests):
            self._targets = {request[0]: targets[request[0]] for request in requests}
            self._sum()
        self._price(outlook)
        most = cost.knee if outlook.prefill_tokens else min(cost.knee, outlook.most_tokens)
        if tokens > most >= self._rows + outlook.prefill_tokens:
            self._spread(requests, decisions, tokens - most)
        return decisions

    def _fewest(self, cost: CostModel) -> int:
        if self._min_draft is not None:
            return self._min_draft
        return 0 if cost.fitted else 1

    def _follow(self, requests: Sequence[Drafting], outlook: Outlook) -> None:
        """Before the first decision of a batch, targets that agree with each other; later, notices that prices have
        moved: targets of running rounds are then stale."""
        cost = outlook.cost
        if cost is not self._cost:
            if self._cost is None or not _is_near(cost, self._cost):
                self._targets = {}
                self._sum()
            self._cost = cost
            self._epoch += 1
            self._price(outlook)
        if not self._targets:
            for _ in range(PASSES):
                before = self._rate
                for request in requests:
                    self._aim(request, outlook)
                self._price(outlook)
                if abs(self._rate - before) <= 0.02 * before:
                    break
        if abs(self._rate - self._epoch_rate) > RATE_TOLERANCE * self._epoch_rate:
            self._epoch, self._epoch_rate = self._epoch + 1, self._rate

    def _aim(self, request: Drafting, outlook: Outlook) -> _Target:
        """The length of highest worth at the present prices becomes the request's target."""
        name, limit = request.request_id, self._draft_limit
        rounds = outlook.acceptance.rounds(name)
        survival = outlook.acceptance.survival(name, limit)
        last = self._targets.get(name)
        context, read_draft, read_renewal, read_full = self._read_times(request, last, outlook.cost)
        draft = read_draft + 2.0 * self._token_price  # its own step's token, and one more in the verification
        verify = read_full + self._token_price
        low, share, every = self._fewest(outlook.cost), self._share, outlook.cost.kv.refresh_every
        price = _best_rate(survival, low, draft + share, verify + share, every, read_renewal)
        if self._rate > 0.0:
            price = price ** self._own_weight * self._rate ** (1.0 - self._own_weight)
        length, worth = _best_length(survival, low, price * draft, price * verify, every, price * read_renewal)
        if rounds == 0 and length > 0:
            length = min(limit, max(low, 1, length + self._first_spread // 4 - request.order % self._first_spread))
        steps = length + 1
        target = self._targets[name] = _Target(
            rounds + (1 if rounds < SETTLED else 2), self._epoch, context, length, price * draft + worth,
            price * read_renewal, survival, read_draft, read_renewal, read_full,
            (1.0 + sum(survival[:length])) / steps,
            (length * read_draft + length // every * read_renewal + read_full) / steps, (2 * length + 1) / steps)
        if last is not None:
            self._tokens -= last.tokens
            self._seconds -= last.seconds
            self._rows -= last.rows
        self._tokens += target.tokens
        self._seconds += target.seconds
        self._rows += target.rows
        return target

    def _read_times(self, request: Drafting, last: _Target | None,
                    cost: CostModel) -> tuple[int, float, float, float]:
        """Context, and marginal seconds of a draft, of a renewal besides and of a verification: those of the last
        target if still true."""
        if last is not None and last.epoch == self._epoch and 0 <= request.context - last.context <= last.context // 64:
            return last.context, last.read_draft, last.read_renewal, last.read_full
        context, kv = request.context, cost.kv
        renewing, resting = kv.sparse_bytes(context, kv.refresh_every - 1), kv.sparse_bytes(context, 0)
        if kv.refresh_every == 1:
            renewing = resting = kv.sparse_bytes(context, 2)
        return (context, cost.per_byte * resting, cost.per_byte * (renewing - resting),
                cost.per_byte * kv.full_bytes(context))

    def _sum(self) -> None:
        """The sums anew, over the targets there are."""
        targets = self._targets.values()
        self._tokens = sum(target.tokens for target in targets)
        self._seconds = sum(target.seconds for target in targets)
        self._rows = sum(target.rows for target in targets)

    def _price(self, outlook: Outlook) -> None:
        """What the batch does on average if everyone keeps to its target. A token is free well below the knee and
        costs `per_token` above it; without targets yet, weights and prices are those of an empty step."""
        cost, rows = outlook.cost, self._rows
        if cost.weights == 0.0:
            self._token_price = cost.per_token
        else:
            load = (rows + outlook.prefill_tokens) / cost.knee
            self._token_price = cost.per_token * min(1.0, max(0.0, (load - 0.8) / 0.4))
        fixed = cost.base + max(cost.weights, cost.per_token * rows)
        self._share = max(0.0, fixed - self._token_price * rows) / max(1, len(self._targets))
        self._rate = self._tokens / (fixed + self._seconds) if self._targets else 0.0

    def _spread(self, requests: Sequence[Drafting], decisions: list[Decision], excess: float) -> None:
        """Puts verifications off where a step would pass the knee, or what the engine has a fast way for, by `excess`
        tokens though the mean step does not.
        Those whose next draft is most likely to be accepted go first: they lose least by drafting it."""
        movable = [i for i, (r, d) in enumerate(zip(requests, decisions, strict=True))
                   if d is VERIFY and r.room > 0 and r.num_drafted > 0]
        last = self._draft_limit - 1
        movable.sort(key=lambda i: -self._targets[requests[i].request_id].survival[min(requests[i].num_drafted, last)])
        for i in movable:
            if excess <= 0:
                break
            decisions[i] = DRAFT
            excess -= requests[i].num_drafted


def _is_near(one: CostModel, other: CostModel) -> bool:
    """Whether prices of one serve for targets of the other until they are renewed: a refit, not another scale."""
    return (one.kv == other.kv and one.fitted == other.fitted
            and 0.8 * other.per_byte <= one.per_byte <= 1.25 * other.per_byte)


def _best_rate(survival: Sequence[float], low: int, draft: float, verify: float, every: int, extra: float) -> float:
    """The most expected tokens per cost over all lengths from `low` on, at `draft` a draft and `verify` besides; every
    `every`th draft costs `extra` more."""
    tokens, cost = 1.0 + sum(survival[:low]), low * draft + low // every * extra + verify
    best = tokens / cost
    for g in range(low, len(survival)):
        tokens += survival[g]
        cost += draft
        if extra and (g + 1) % every == 0:
            cost += extra
        rate = tokens / cost
        if rate > best:
            best = rate
        elif not extra:
            break  # expected tokens are concave and costs linear in the length: there is one peak
    return best


def _best_length(survival: Sequence[float], low: int, draft: float, verify: float, every: int,
                 extra: float) -> tuple[int, float]:
    """The length of most worth per step, expected tokens less costs being its worth, and that worth. Costs as in
    `_best_rate`."""
    value = 1.0 + sum(survival[:low]) - low * draft - low // every * extra - verify
    length, best = low, value / (low + 1)
    for g in range(low, len(survival)):
        value += survival[g] - draft
        if extra and (g + 1) % every == 0:
            value -= extra
        worth = value / (g + 2)
        if worth > best:
            length, best = g + 1, worth
        elif not extra:
            break
    return length, best
