"""Recorded verifications: forecasts of the estimators on them, and scenarios made of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aspire.simulate.curves import recorded
from aspire.simulate.run import Scenario, SimulatedRequest
from aspire.speculation.acceptance import AcceptanceEstimator


@dataclass(frozen=True, slots=True)
class Trace:
    """Verifications of one request in order: (drafts verified, drafts accepted)."""

    context: int
    rounds: tuple[tuple[int, int], ...]


def load_traces(path: Path) -> tuple[Trace, ...]:
    """Reads JSON lines {"context": 6144, "rounds": [[16, 9], [16, 16], ...]}, one request a line.

    Raises ValueError naming file and line.
    """
    traces = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            rounds = tuple((int(d), int(a)) for d, a in entry["rounds"])
            if not rounds or any(not 0 <= a <= d for d, a in rounds):
                raise ValueError("rounds must be non-empty with 0 <= accepted <= drafted")
            traces.append(Trace(int(entry["context"]), rounds))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"traces file {path} line {number} must hold context and rounds: {error}") from error
    if not traces:
        raise ValueError(f"traces file {path} must hold at least one request")
    return tuple(traces)


def forecast_error(traces: Sequence[Trace], make: Callable[[], AcceptanceEstimator], *, window: int = 16,
                   warm_up: int = 8) -> float:
    """Mean absolute error of forecast tokens per verification. Requests take turns, as in a batch; every verification
    is forecast before its outcome is told. One outcome is mostly luck (its deviation is about 5 tokens at 16 drafts),
    so forecasts and outcomes are compared as means over `window` verifications, after `warm_up` of a request."""
    estimator = make()
    misses: list[list[float]] = [[] for _ in traces]
    for turn in range(max(len(trace.rounds) for trace in traces)):
        for i, trace in enumerate(traces):
            if turn < len(trace.rounds):
                drafted, num_accepted = trace.rounds[turn]
                misses[i].append(sum(estimator.survival(str(i), drafted)) - num_accepted)
                estimator.observe(str(i), drafted, num_accepted)
    errors = [abs(sum(run[first:first + window]) / window)
              for run in misses for first in range(warm_up, len(run) - window + 1, window)]
    if not errors:
        raise ValueError(f"traces must have a request of at least {warm_up + window} verifications for a forecast")
    return sum(errors) / len(errors)


def recorded_scenario(traces: Sequence[Trace], batch: int, horizon: float) -> Scenario:
    """A batch that replays the recorded acceptance, repeated to fill it, at the recorded contexts."""
    curves = [recorded([a for _, a in trace.rounds], max(d for d, _ in trace.rounds)) for trace in traces]
    requests = tuple(SimulatedRequest(traces[i % len(traces)].context, 200_000, curves[i % len(traces)])
                     for i in range(batch))
    return Scenario("recorded", requests, batch, horizon=horizon)
