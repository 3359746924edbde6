"""OnlineFit: a cost model that follows ordinary traffic, in a few microseconds a step.

For a given knee the model is linear, t = base + per_token * max(knee, tokens) + per_byte * bytes, so a step only adds
to the normal equations of each knee of a grid; older steps count less and less. When a fit is due, the knees are solved
one a step, so that no step pays for all of them.
"""

import math
from dataclasses import dataclass, fields, replace
from itertools import product

from aspire.speculation.cost import TRUSTED_ERROR, CostModel
from aspire.speculation.least_squares import Three, non_negative

KNEES = (0.0, 32.0, 48.0, *map(float, range(64, 193, 16)), 224.0, 256.0, 320.0, 384.0, 512.0)  # tokens
LEAST_STEPS = 16
KEEP_KNEE = 0.98  # of the present knee's error, below which another one's must lie
ANCHOR_TOKENS = (1.0, 1024.0)  # and at the knee
ANCHOR_SHARES = (0.0, 0.5, 1.5)  # of the most KV bytes seen


@dataclass(slots=True)
class _Shared:
    """Weighted sums over steps that no knee changes: of 1, bytes, bytes^2, seconds, bytes * seconds, seconds^2."""

    one: float = 0.0
    kv: float = 0.0
    kv2: float = 0.0
    t: float = 0.0
    kv_t: float = 0.0
    t2: float = 0.0

    def add(self, weight: float, kv_bytes: float, seconds: float) -> None:
        weighted_kv, weighted_t = weight * kv_bytes, weight * seconds
        self.one += weight
        self.kv += weighted_kv
        self.kv2 += weighted_kv * kv_bytes
        self.t += weighted_t
        self.kv_t += weighted_kv * seconds
        self.t2 += weighted_t * seconds

    def scale(self, factor: float) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) * factor)


@dataclass(slots=True)
class _Knee:
    """Weighted sums over steps that hold n = max(knee, tokens): of n, n^2, n * bytes, n * seconds."""

    at: float
    n: float = 0.0
    n2: float = 0.0
    n_kv: float = 0.0
    n_t: float = 0.0

    def add(self, weight: float, tokens: float, kv_bytes: float, seconds: float) -> None:
        n = tokens if tokens > self.at else self.at
        weighted = weight * n
        self.n += weighted
        self.n2 += weighted * n
        self.n_kv += weighted * kv_bytes
        self.n_t += weighted * seconds

    def scale(self, factor: float) -> None:
        self.n, self.n2, self.n_kv, self.n_t = (sum_ * factor for sum_ in (self.n, self.n2, self.n_kv, self.n_t))


class OnlineFit:
    """Errors count relative to the present model's seconds, large ones linearly, as in `cost.fit`. Steady traffic
    varies in few directions, so each fit also sees anchors: predictions of the present model at spread points, with
    little weight, which keep what the traffic says nothing about."""

    def __init__(self, model: CostModel, *, window: int = 256, every: int = 256, anchor_weight: float = 0.02) -> None:
        """window: steps after which one weighs 1/e of a new one. every: steps between fits."""
        self.model = model
        self._growth = math.exp(1.0 / window)
        self._every = every
        self._anchor_weight = anchor_weight
        own = {model.knee} if model.fitted and 0.0 < model.knee < 1e6 else set()
        self._knees = [_Knee(at) for at in sorted({*KNEES, *own})]
        self._shared = _Shared()
        self._unit = 1.0  # weight of the newest step: new ones weigh more, rather than old ones less
        self._count = 0.0  # steps, each by its age
        self._error = TRUSTED_ERROR / 3.0  # a running median of relative errors
        self._typical = 0.0  # a running median of seconds
        self._most = (1.0, 1.0)  # tokens and KV bytes seen
        self._seen = 0
        self._solved: list[tuple[float, float, Three]] = []  # error, knee, coefficients

    def add(self, tokens: int, kv_bytes: float, seconds: float) -> CostModel | None:
        """A step was measured; returns the renewed model when one is done."""
        if seconds <= 0.0:
            return None
        self._count_step(float(tokens), kv_bytes, seconds)
        self._seen += 1
        left = -self._seen % self._every  # steps until a fit is due
        first = max(0, len(self._knees) - 1 - left)
        if self._seen < LEAST_STEPS or left >= len(self._knees):
            return None
        if left == len(self._knees) - 1:
            self._solved.clear()
        for knee in self._knees[len(self._solved):first + 1]:
            self._solved.append(self._solve(knee))
        if left:
            return None
        self.model = self._best()
        self._solved.clear()
        return self.model

    def _count_step(self, tokens: float, kv_bytes: float, seconds: float) -> None:
        self._unit *= self._growth
        self._count = self._count / self._growth + 1.0
        if self._unit > 1e12:
            self._shrink()
        self._typical = _follow(self._typical or seconds, seconds)
        trust, scale = 1.0, self._typical
        if self.model.fitted:
            scale = max(self.model.step_seconds(tokens, kv_bytes), 0.1 * self._typical)
            error = abs(scale - seconds) / scale
            self._error = _follow(self._error, error)
            trust = min(1.0, max(TRUSTED_ERROR, 3.0 * self._error) / max(error, 1e-12))
        else:
            trust = min(1.0, 2.0 * self._typical / seconds)
        weight = self._unit * trust / (scale * scale)
        self._shared.add(weight, kv_bytes, seconds)
        for knee in self._knees:
            knee.add(weight, tokens, kv_bytes, seconds)
        self._most = max(self._most[0], tokens), max(self._most[1], kv_bytes)

    def _shrink(self) -> None:
        """Weights stay finite."""
        self._shared.scale(1.0 / self._unit)
        for knee in self._knees:
            knee.scale(1.0 / self._unit)
        self._unit = 1.0

    def _solve(self, knee: _Knee) -> tuple[float, float, Three]:
        """Error, knee and coefficients under that knee, anchors included."""
        shared, own = replace(self._shared), replace(knee)
        for tokens, kv_bytes, seconds, weight in self._anchors():
            shared.add(weight, kv_bytes, seconds)
            own.add(weight, tokens, kv_bytes, seconds)
        # Columns scaled to the same size: bytes are 1e10 where one is 1.
        n, kv = math.sqrt(own.n2 / shared.one) or 1.0, math.sqrt(shared.kv2 / shared.one) or 1.0
        gram = [[shared.one, own.n / n, shared.kv / kv], [own.n / n, own.n2 / (n * n), own.n_kv / (n * kv)],
                [shared.kv / kv, own.n_kv / (n * kv), shared.kv2 / (kv * kv)]]
        moment = [shared.t, own.n_t / n, shared.kv_t / kv]
        x = non_negative(gram, moment)
        explained = sum(x[i] * (2.0 * moment[i] - sum(gram[i][j] * x[j] for j in range(3))) for i in range(3))
        return (shared.t2 - explained) / shared.one, knee.at, (x[0], x[1] / n, x[2] / kv)

    def _best(self) -> CostModel:
        """The knee of least error; the present one unless another is clearly better. Knees beyond all steps seen are
        one and the same, and without an earlier model the lowest of them is taken."""
        present = self.model.knee if self.model.fitted else -1.0
        lowest_unseen = min((at for _, at, _ in self._solved if at >= self._most[0]), default=math.inf)
        usable = [one for one in self._solved if one[1] <= lowest_unseen or _is_same(one[1], present)]
        best = min(usable, key=lambda one: one[0])
        for one in usable:
            if _is_same(one[1], present) and best[0] > KEEP_KNEE * one[0]:
                best = one
        _, knee, (base, per_token, per_byte) = best
        return CostModel(base, per_token * knee, per_token, per_byte, self.model.kv)

    def _anchors(self) -> list[tuple[float, float, float, float]]:
        """Tokens, bytes, seconds, weight."""
        model = self.model
        if not model.fitted:  # an assumed scale would only mislead
            return []
        points = product((*ANCHOR_TOKENS, model.knee if model.knee < 1e6 else 256.0), ANCHOR_SHARES)
        timed = [(tokens, share * self._most[1], model.step_seconds(tokens, share * self._most[1]))
                 for tokens, share in points]
        weight = self._anchor_weight * self._count * self._unit
        return [(*one, weight / (one[2] * one[2])) for one in timed if one[2] > 0.0]


def _is_same(knee: float, present: float) -> bool:
    return math.isclose(knee, present, rel_tol=1e-6)


def _follow(median: float, value: float) -> float:
    """A running median's next value: it settles where as many values lie above as below."""
    return median * 1.05 if value > median else median / 1.05
