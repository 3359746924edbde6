"""Seconds of a step from its tokens and KV bytes: t = base + max(weights, per_token * tokens) + per_byte * bytes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aspire.speculation.layers import LayerPlan, renews
from aspire.speculation.least_squares import non_negative
from aspire.speculation.selection import SelectionConfig

if TYPE_CHECKING:
    from aspire.schedule.plan import StepPlan


TRUSTED_ERROR = 0.05  # relative; a fit counts larger errors linearly


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV bytes that a row reads, on one device.

    bytes_per_token: keys and values of one token in one layer. num_full: layers a sparse row reads whole;
    num_listed: layers with a list. windows: (window, number of layers) of the sliding layers, the same for all rows.
    num_resting: of the whole ones, those with a list in drafts that do not renew; only every `refresh_every`th does.
    """

    bytes_per_token: int
    num_full: int
    num_listed: int
    windows: tuple[tuple[int, int], ...]
    selection: SelectionConfig
    num_resting: int = 0
    refresh_every: int = 1

    def full_bytes(self, kv_len: int) -> float:
        """A full row whose last token sees `kv_len` keys (its tokens share the reading)."""
        return self.bytes_per_token * ((self.num_full + self.num_listed) * kv_len + self._sliding(kv_len))

    def sparse_bytes(self, context: int, num_drafted: int) -> float:
        """A sparse row of a request with `context` known tokens and `num_drafted` drafts before this one."""
        kv_len = context + num_drafted
        resting = 0 if renews(num_drafted, self.refresh_every) else self.num_resting
        whole = (self.num_full - resting) * kv_len
        listed = (self.num_listed + resting) * self.selection.tokens_read(context, num_drafted)
        return self.bytes_per_token * (whole + listed + self._sliding(kv_len))

    def mean_sparse_bytes(self, context: int) -> float:
        """The mean sparse row of a long round."""
        if self.num_resting == 0:
            return self.sparse_bytes(context, 2)
        return sum(self.sparse_bytes(context, j) for j in range(self.refresh_every)) / self.refresh_every

    def plan_bytes(self, plan: "StepPlan") -> float:
        """All rows of a step."""
        num_layers, skipped = self.num_full + self.num_listed, self.selection.tokens_skipped
        total = 0
        for _, _, kind, start, num_tokens, num_drafted, _, _, _ in plan.rows:
            kv_len = start + num_tokens
            total += num_layers * kv_len
            if self.windows:
                total += self._sliding(kv_len)
            if kind.value == "sparse":
                resting = self.num_resting and not renews(num_drafted, self.refresh_every)
                listed = self.num_listed + self.num_resting if resting else self.num_listed
                total -= listed * skipped(kv_len - num_drafted)
        return float(self.bytes_per_token * total)

    def _sliding(self, kv_len: int) -> int:
        return sum([count * min(window, kv_len) for window, count in self.windows]) if self.windows else 0


def kv_shape(layers: LayerPlan, selection: SelectionConfig, bytes_per_token: int,
             windows: tuple[int | None, ...] = ()) -> KvShape:
    """windows: sliding window of each layer, None where it sees everything; empty: no layer has one.

    Raises ValueError when the windows are not one per layer or bytes_per_token is not positive.
    """
    if windows and len(windows) != layers.num_layers:
        raise ValueError(f"windows must have one entry for each of the {layers.num_layers} layers, got {len(windows)}")
    if bytes_per_token <= 0:
        raise ValueError(f"bytes_per_token must be positive, got {bytes_per_token!r}")
    spans: list[int | None] = list(windows) if windows else [None] * layers.num_layers
    sizes = sorted({span for span in spans if span is not None})
    full = sum(1 for span, index in zip(spans, layers.reads, strict=True) if span is None and index is None)
    listed = sum(1 for span, index in zip(spans, layers.reads, strict=True) if span is None and index is not None)
    resting = sum(1 for layer, index in enumerate(layers.reads) if index != layers.reads_between(layer))
    return KvShape(bytes_per_token, full, listed, tuple((size, spans.count(size)) for size in sizes), selection,
                   resting, layers.refresh_every)


@dataclass(frozen=True, slots=True)
class CostModel:
    """base, weights: seconds; per_token: seconds a token; per_byte: seconds a KV byte. Up to `knee` tokens the step
    waits for the weights and a token costs nothing. `fitted` tells measured coefficients from assumed ones."""

    base: float
    weights: float
    per_token: float
    per_byte: float
    kv: KvShape
    fitted: bool = True

    def __post_init__(self) -> None:
        for name in ("base", "weights", "per_token", "per_byte"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"cost.{name} must be >= 0, got {getattr(self, name)!r}")

    def step_seconds(self, tokens: float, kv_bytes: float) -> float:
        return self.base + max(self.weights, self.per_token * tokens) + self.per_byte * kv_bytes

    @property
    def knee(self) -> float:
        """Tokens of a step from which a further token costs time; infinite when tokens are free."""
        return self.weights / self.per_token if self.per_token > 0 else float("inf")

    def save(self, path: Path) -> None:
        """The coefficients as JSON; the KV shape belongs to the engine and is not written."""
        names = ("base", "weights", "per_token", "per_byte", "fitted")
        path.write_text(json.dumps({name: getattr(self, name) for name in names}, indent=1) + "\n")


def nominal(kv: KvShape) -> CostModel:
    """What to assume before anything was measured: only KV bytes cost time, and a row as much as 16 tokens' KV, as if
    a large batch shared the weights. Only ratios matter (the scale is that of a 1 TB/s machine)."""
    per_byte = 1e-12
    row = 16 * kv.bytes_per_token * (kv.num_full + kv.num_listed + sum(count for _, count in kv.windows))
    return CostModel(0.0, 0.0, row * per_byte, per_byte, kv, fitted=False)


def load(path: Path, kv: KvShape) -> CostModel:
    """Raises ValueError naming the file when it does not hold saved coefficients."""
    try:
        stored = json.loads(path.read_text())
        base, weights, per_token, per_byte = (
            float(stored[name]) for name in ("base", "weights", "per_token", "per_byte"))
        fitted = bool(stored.get("fitted", True))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"cost model file {path} must hold base, weights, per_token, per_byte: {error!r}") from error
    return CostModel(base, weights, per_token, per_byte, kv, fitted)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step. weight: how much the fit trusts it."""

    tokens: float
    kv_bytes: float
    seconds: float
    weight: float = 1.0


def fit(samples: "list[Sample]", kv: KvShape, *, num_knees: int = 12) -> CostModel:
    """Non-negative least squares of relative errors, Huber-weighted against outliers.

    For a given knee K the model is linear: t = base + per_token * max(K, tokens) + per_byte * bytes; K is searched
    over quantiles of the tokens. Steps all below the knee cannot tell base from weights: the knee then is the largest
    token count seen. Raises ValueError for fewer than 4 samples.
    """
    usable = [s for s in samples if s.seconds > 0]
    if len(usable) < 4:
        raise ValueError(f"samples must hold at least 4 timed steps, got {len(usable)}")
    best: tuple[float, float, tuple[float, float, float]] | None = None
    for knee in _knees([s.tokens for s in usable], num_knees):
        columns = [(1.0, max(knee, s.tokens), s.kv_bytes) for s in usable]
        coefficients, error = _robust_fit(columns, usable)
        if best is None or error < best[0] * 0.999:
            best = (error, knee, coefficients)
    assert best is not None
    _, knee, (base, per_token, per_byte) = best
    return CostModel(base, per_token * knee, per_token, per_byte, kv)


def _knees(tokens: list[float], count: int) -> list[float]:
    ordered = sorted(tokens)
    picks = [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]
    return sorted({0.0, *picks})


def _robust_fit(columns: list[tuple[float, float, float]],
                samples: list[Sample]) -> tuple[tuple[float, float, float], float]:
    """Coefficients and the sum of Huber losses of errors relative to the fit. Errors relative to the measured time
    would let a step that reads too short rule the fit."""
    seconds = [s.seconds for s in samples]
    typical = sorted(seconds)[len(seconds) // 2]
    scale = [max(t, typical) for t in seconds]
    trust = [1.0] * len(samples)
    solution, errors = (0.0, 0.0, 0.0), [0.0]
    for _ in range(4):
        weights = [s.weight * t / (y * y) for s, t, y in zip(samples, trust, scale, strict=True)]
        solution = _non_negative(columns, seconds, weights)
        base, per_token, per_byte = solution
        scale = [max(base * one + per_token * n + per_byte * kv, 0.1 * typical) for one, n, kv in columns]
        errors = [abs(y - t) / y for y, t in zip(scale, seconds, strict=True)]
        bound = max(TRUSTED_ERROR, 3.0 * sorted(errors)[len(errors) // 2])
        trust = [min(1.0, bound / max(e, 1e-12)) for e in errors]
    loss = sum(s.weight * (e * e if e < TRUSTED_ERROR else TRUSTED_ERROR * (2.0 * e - TRUSTED_ERROR))
               for e, s in zip(errors, samples, strict=True))
    return solution, loss


def _non_negative(columns: list[tuple[float, float, float]], target: list[float],
                  weights: list[float]) -> tuple[float, float, float]:
    """Weighted least squares with all three coefficients >= 0."""
    scale = [max(abs(c[i]) for c in columns) or 1.0 for i in range(3)]
    gram = [[0.0] * 3 for _ in range(3)]
    moment = [0.0] * 3
    for column, y, w in zip(columns, target, weights, strict=True):
        x = [column[i] / scale[i] for i in range(3)]
        for i in range(3):
            moment[i] += w * x[i] * y
            for j in range(3):
                gram[i][j] += w * x[i] * x[j]
    best = non_negative(gram, moment)
    return best[0] / scale[0], best[1] / scale[1], best[2] / scale[2]
