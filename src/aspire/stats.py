"""StepStats, the one record of a step, and its observers: log line, JSON lines, Chrome/Perfetto trace.

Standard library only; knows nothing of the engine, which calls `observer.on_step(stats)` after each commit.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TextIO

from aspire.schedule.plan import RowKind, StepPlan, Verdict

SPARSE = RowKind.SPARSE  # bound once: an enum's look-up is slow
_new = tuple.__new__  # makes named tuples in half the time of a call of theirs, which goes through Python

RowActivity = Literal["prefill", "draft", "verify"]


class RowStats(NamedTuple):
    """One request's part of a step. A "verify" row with num_drafted 0 is plain decoding. A named tuple for the time it
    takes to make one.

    num_drafted: drafts this row verified (verify), or made before this one (draft).
    num_accepted: of the verified ones. num_emitted: tokens the row committed, or would have if not stopped.
    """

    request_id: str
    kind: RowActivity
    num_tokens: int
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a step did. Times are seconds: `time` of the step's start since the engine's, `duration` of the step.

    tokens: input tokens of all rows. kv_usage: share of KV blocks in use after the step, in [0, 1].
    running, waiting: numbers of requests after the step. offloaded, restored: blocks copied to host memory and back
    from there. The tuples name the requests that changed in this step.
    """

    step: int
    time: float
    duration: float
    rows: tuple[RowStats, ...]
    tokens: int
    kv_usage: float
    running: int
    waiting: int
    arrived: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    offloaded: int = 0
    restored: int = 0

    @property
    def num_emitted(self) -> int:
        return sum(row.num_emitted for row in self.rows)

    @property
    def num_drafted(self) -> int:
        """Drafts that reached a verdict in this step."""
        return sum(row.num_drafted for row in self.rows if row.kind == "verify")

    @property
    def num_accepted(self) -> int:
        return sum(row.num_accepted for row in self.rows)

    def to_json(self) -> str:
        """One line of JSON; `read_stats` reads it back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["rows"] = [row._asdict() for row in self.rows]
        return json.dumps(values, separators=(",", ":"))


class Observer(Protocol):
    """Sees every step, in order, on the engine's thread; must be quick. `close` comes once, at the end."""

    def on_step(self, stats: StepStats) -> None: ...

    def close(self) -> None: ...


def row_stats(plan: StepPlan, verdicts: Sequence[Verdict]) -> tuple[RowStats, ...]:
    """The rows of a plan with what became of them; `verdicts` is in the order of `plan.rows`."""
    assert len(plan.rows) == len(verdicts), "one verdict per row"
    rows = []
    for row, verdict in zip(plan.rows, verdicts, strict=True):
        name, _, kind, _, num_tokens, num_drafted, _, prompt, _ = row
        num_emitted = len(verdict.tokens)
        if kind is SPARSE:
            rows.append(_new(RowStats, (name, "draft", num_tokens, num_drafted, 0, num_emitted)))
        else:
            rows.append(RowStats(name, "prefill" if prompt else "verify", num_tokens, num_drafted,
                                 verdict.num_accepted, num_emitted))
    return tuple(rows)


def read_stats(path: str | Path) -> list[StepStats]:
    """The steps of a file that `JsonLines` wrote. ValueError names file and line of anything else."""
    steps = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                steps.append(_step_from(json.loads(line)))
            except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
                raise ValueError(f"{path}, line {number} must be one step's statistics as --stats-file writes them, "
                                 f"got {line.strip()[:60]!r}") from error
    return steps


def _step_from(entry: dict[str, Any]) -> StepStats:
    lists: dict[str, Any] = {name: tuple(entry.pop(name)) for name in ("arrived", "preempted", "finished")}
    rows = tuple(RowStats(**row) for row in entry.pop("rows"))
    return StepStats(rows=rows, **lists, **entry)


class LogLine:
    """Writes one line of rates every `interval` seconds of engine time."""

    def __init__(self, file: TextIO, *, interval: float = 5.0) -> None:
        self._file = file
        self._interval = interval
        self._since: float | None = None
        self._emitted = self._drafted = self._accepted = 0

    def on_step(self, stats: StepStats) -> None:
        if self._since is None:
            self._since = stats.time
        self._emitted += stats.num_emitted
        self._drafted += stats.num_drafted
        self._accepted += stats.num_accepted
        elapsed = stats.time + stats.duration - self._since
        if elapsed >= self._interval:
            self._write(stats, elapsed)
            self._since, self._emitted, self._drafted, self._accepted = stats.time + stats.duration, 0, 0, 0

    def _write(self, stats: StepStats, elapsed: float) -> None:
        rate = f"{self._accepted / self._drafted:.1%}" if self._drafted else "-"
        print(f"step {stats.step}: {self._emitted / elapsed:.1f} tokens/s, acceptance {rate}, "
              f"running {stats.running}, waiting {stats.waiting}, KV {stats.kv_usage:.1%}", file=self._file, flush=True)

    def close(self) -> None:
        """Nothing is held."""


class JsonLines:
    """Writes each step as one JSON line; raises OSError when the file cannot be written."""

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def on_step(self, stats: StepStats) -> None:
        self._file.write(stats.to_json() + "\n")

    def close(self) -> None:
        self._file.close()


class Trace:
    """Writes the steps as a Chrome trace (JSON array format), which Perfetto and chrome://tracing open.

    Streamed: the format allows the closing bracket to be missing, so a killed run leaves a readable file.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._rows: dict[str, int] = {}
        self._separator = "[\n"

    def on_step(self, stats: StepStats) -> None:
        for event in trace_events(stats, self._rows):
            self._file.write(self._separator + json.dumps(event, separators=(",", ":")))
            self._separator = ",\n"

    def close(self) -> None:
        self._file.write("\n]\n" if self._separator == ",\n" else "[]\n")
        self._file.close()


def write_trace(path: str | Path, steps: Iterable[StepStats]) -> None:
    """The whole trace of finished steps in one call."""
    trace = Trace(path)
    for stats in steps:
        trace.on_step(stats)
    trace.close()


_ENGINE, _REQUESTS = 1, 2  # process ids of the trace: one track for the engine, one per request


def trace_events(stats: StepStats, tracks: dict[str, int]) -> Iterator[dict[str, object]]:
    """The trace events of a step. `tracks` maps request ids to track numbers and gains the new ones."""
    start, length = round(stats.time * 1e6, 1), round(stats.duration * 1e6, 1)  # microseconds
    if stats.step == 0 or not tracks:
        yield _name("process_name", _ENGINE, 0, "engine")
        yield _name("process_name", _REQUESTS, 0, "requests")
    yield {"name": f"step {stats.step}", "ph": "X", "pid": _ENGINE, "tid": 0, "ts": start, "dur": length,
           "args": {"tokens": stats.tokens, "rows": len(stats.rows)}}
    for counter, value in (("tokens", stats.tokens), ("kv_usage", stats.kv_usage), ("running", stats.running),
                           ("waiting", stats.waiting)):
        yield {"name": counter, "ph": "C", "pid": _ENGINE, "ts": start, "args": {counter: value}}
    for request_id in (*stats.arrived, *(row.request_id for row in stats.rows)):
        if request_id not in tracks:
            tracks[request_id] = len(tracks) + 1
            yield _name("thread_name", _REQUESTS, tracks[request_id], request_id)
    for row in stats.rows:
        yield {"name": _label(row), "cat": row.kind, "ph": "X", "pid": _REQUESTS, "tid": tracks[row.request_id],
               "ts": start, "dur": length, "args": row._asdict()}
    for mark, request_ids in (("arrived", stats.arrived), ("preempted", stats.preempted), ("finished", stats.finished)):
        for request_id in request_ids:
            yield {"name": mark, "ph": "i", "s": "t", "pid": _REQUESTS, "tid": tracks.get(request_id, 0),
                   "ts": start if mark == "arrived" else start + length}


def _label(row: RowStats) -> str:
    if row.kind == "verify":
        return f"verify {row.num_accepted}/{row.num_drafted}" if row.num_drafted else "decode"
    return f"prefill {row.num_tokens}" if row.kind == "prefill" else f"draft {row.num_drafted + 1}"


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
