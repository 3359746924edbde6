"""What the best possible policy would reach, for comparison: brute force over fixed lengths, and a joint choice."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from aspire.speculation.cadence import Decision, Drafting, Outlook
from aspire.speculation.cost import CostModel


@dataclass(frozen=True, slots=True)
class Stationary:
    """A request that never changes: its context, and P(first j drafts accepted) for j = 1, 2, ..."""

    context: int
    survival: tuple[float, ...]


def stationary_rate(batch: Sequence[Stationary], lengths: Sequence[int], cost: CostModel) -> float:
    """Tokens a second when request i always drafts lengths[i] and phases are spread evenly."""
    tokens = rows = kv_bytes = 0.0
    for request, g in zip(batch, lengths, strict=True):
        tokens += (1.0 + sum(request.survival[:g])) / (g + 1)
        rows += (2 * g + 1) / (g + 1)
        drafts = sum(cost.kv.sparse_bytes(request.context, j) for j in range(g))
        kv_bytes += (drafts + cost.kv.full_bytes(request.context + g)) / (g + 1)
    return tokens / cost.step_seconds(rows, kv_bytes)


def brute_force(batch: Sequence[Stationary], cost: CostModel, limit: int) -> tuple[float, tuple[int, ...]]:
    """The best rate over all combinations of lengths 0..limit, and the lengths; (limit + 1)^n evaluations."""
    return max((stationary_rate(batch, lengths, cost), lengths)
               for lengths in itertools.product(range(limit + 1), repeat=len(batch)))


@dataclass(slots=True)
class JointGreedy:
    """Chooses each step's verifications together, pricing the step's actual time instead of a mean price per row.

    The value of a request's state (drafts so far) solves its renewal problem at the batch's rate R; verifications are
    then taken in order of advantage while what they add exceeds R times what they add to this very step. An
    experiment (docs/LOG.md has what it showed), not a preset. `rate`: R, followed with the given smoothing.
    """

    draft_limit: int = 16
    rate: float = 0.0
    _tokens: float = field(default=0.0, repr=False)
    _seconds: float = field(default=0.0, repr=False)

    def decide(self, requests: Sequence[Drafting], outlook: Outlook) -> list[Decision]:
        cost = outlook.cost
        rate = self._tokens / self._seconds if self._seconds else 0.0
        self.rate = rate
        decisions = [Decision.DRAFT if r.room > 0 else Decision.VERIFY for r in requests]
        rows = float(outlook.prefill_tokens + sum(
            1 if d is Decision.DRAFT else r.num_drafted + 1 for r, d in zip(requests, decisions, strict=True)))
        gains = []
        for i, request in enumerate(requests):
            if request.room > 0:
                survival = outlook.acceptance.survival(request.request_id, self.draft_limit)
                gains.append((self._advantage(request, survival, rate, cost), i))
        gains.sort(reverse=True)
        for gain, i in gains:
            more = rows + requests[i].num_drafted
            price = max(cost.weights, cost.per_token * more) - max(cost.weights, cost.per_token * rows)
            if gain <= rate * price:
                continue
            decisions[i] = Decision.VERIFY
            rows = more
        self._account(requests, decisions, rows, outlook)
        return decisions

    def _advantage(self, request: Drafting, survival: Sequence[float], rate: float, cost: CostModel) -> float:
        """Tokens gained by verifying now rather than drafting on, KV time priced, token time not."""
        context, limit, d = request.context, self.draft_limit, request.num_drafted
        full = rate * cost.per_byte * cost.kv.full_bytes(context)
        sparse = rate * cost.per_byte * cost.kv.mean_sparse_bytes(context)
        tokens = [1.0]
        for chance in survival:
            tokens.append(tokens[-1] + chance)
        worth = max((tokens[g] - g * sparse - full) / (g + 1) for g in range(limit + 1))
        value = tokens[limit] - full - worth
        for g in range(limit - 1, d, -1):
            value = max(tokens[g] - full - worth, value - sparse - worth)
        return (tokens[d] - full - worth) - (value - sparse - worth)

    def _account(self, requests: Sequence[Drafting], decisions: Sequence[Decision], rows: float,
                 outlook: Outlook) -> None:
        """Follows the rate that its own decisions are expected to give (memory of about 200 steps)."""
        cost = outlook.cost
        emitted = kv_bytes = 0.0
        for request, decision in zip(requests, decisions, strict=True):
            if decision is Decision.VERIFY:
                survival = outlook.acceptance.survival(request.request_id, self.draft_limit)
                emitted += 1.0 + sum(survival[:request.num_drafted])
                kv_bytes += cost.kv.full_bytes(request.context + request.num_drafted)
            else:
                kv_bytes += cost.kv.sparse_bytes(request.context, request.num_drafted)
        keep = 0.995 if self._seconds else 0.0
        self._tokens = keep * self._tokens + emitted
        self._seconds = keep * self._seconds + cost.step_seconds(rows, kv_bytes)
