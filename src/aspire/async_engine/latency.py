"""Latency: histograms of what users wait for, fed by the stepping thread, read by anyone.

A recording costs about a microsecond, so it may happen per request and step.
"""

from bisect import bisect_left
from collections.abc import Sequence

from aspire.async_engine.streams import OutputStream
from aspire.request import RequestOutput

TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
               40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_BOUNDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
                  120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
LENGTH_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0,
                 50000.0, 100000.0)


class Histogram:
    """Counts of values per bucket; bucket i holds values <= bounds[i], the last one the rest. One writer."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def record(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count) as Prometheus wants them, the last one "+Inf"."""
        result, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            result.append((bound, float(running)))
        return result


class Latency:
    """All histograms of a server's life; seconds, or tokens for the two lengths."""

    __slots__ = (
        "end_to_end",
        "finished",
        "first_token",
        "inter_token",
        "output_length",
        "per_output_token",
        "prompt_length",
        "queue",
    )

    def __init__(self) -> None:
        self.first_token = Histogram(TTFT_BOUNDS)
        self.inter_token = Histogram(TOKEN_BOUNDS)  # time between two deliveries to one request
        self.per_output_token = Histogram(TOKEN_BOUNDS)  # mean over a request, first token left out
        self.end_to_end = Histogram(REQUEST_BOUNDS)
        self.queue = Histogram(REQUEST_BOUNDS)
        self.prompt_length = Histogram(LENGTH_BOUNDS)
        self.output_length = Histogram(LENGTH_BOUNDS)
        self.finished: dict[str, int] = {}  # finish reason -> outputs

    def record(self, stream: OutputStream, output: RequestOutput, now: float) -> None:
        """Take an output that arrives now; keeps the stream's times up to date."""
        num_tokens = sum(len(part.token_ids) for part in output.outputs)
        if stream.first_token_time is not None:
            self.inter_token.record(now - stream.last_time)
        elif num_tokens:
            stream.first_token_time = now
            self.first_token.record(now - stream.start_time)
        stream.last_time = now
        if output.finished:
            self._record_finished(stream, output, num_tokens, now)

    def count_finished(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def _record_finished(self, stream: OutputStream, output: RequestOutput, num_tokens: int, now: float) -> None:
        self.end_to_end.record(now - stream.start_time)
        if output.metrics is not None and output.metrics.queue_time is not None:
            self.queue.record(output.metrics.queue_time)
        self.prompt_length.record(len(output.prompt_token_ids))
        self.output_length.record(num_tokens)
        per_output = num_tokens / max(1, len(output.outputs))
        if stream.first_token_time is not None and per_output > 1:
            self.per_output_token.record((now - stream.first_token_time) / (per_output - 1))
        for part in output.outputs:
            self.count_finished(part.finish_reason or "abort")
