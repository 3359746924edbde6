"""What each request was doing when, read from the steps of a run. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aspire.stats import RowStats, StepStats

State = Literal["prefill", "draft", "verify", "decode", "stalled", "waiting", "preempted"]
STATES: tuple[State, ...] = ("prefill", "draft", "verify", "decode", "stalled", "waiting", "preempted")


@dataclass(frozen=True, slots=True)
class Span:
    """`state` in [start, end) seconds. "stalled": it holds a slot but had no row; "waiting": in the queue."""

    start: float
    end: float
    state: State


@dataclass(slots=True)
class _Track:
    spans: list[Span]
    since: float  # end of the last span
    idle: State  # what it does in a step without a row of it
    is_open: bool = True


def request_spans(steps: Sequence[StepStats]) -> dict[str, list[Span]]:
    """The spans of each request, in the order of arrival; neighbours in one state are joined."""
    tracks: dict[str, _Track] = {}
    for stats, end in zip(steps, step_ends(steps), strict=True):
        for request_id in (*stats.arrived, *(row.request_id for row in stats.rows), *stats.preempted):
            tracks.setdefault(request_id, _Track([], stats.time, "waiting"))
        for request_id in stats.preempted:
            _extend(tracks[request_id], stats.time, tracks[request_id].idle)
            tracks[request_id].idle = "preempted"
        for row in stats.rows:
            track = tracks[row.request_id]
            _extend(track, stats.time, track.idle)
            _extend(track, end, state_of(row))
            track.idle = "stalled"
        for request_id in stats.finished:
            if request_id in tracks:
                tracks[request_id].is_open = False
        for track in tracks.values():
            if track.is_open:
                _extend(track, end, track.idle)
    return {request_id: track.spans for request_id, track in tracks.items()}


def step_ends(steps: Sequence[StepStats]) -> list[float]:
    """When each step ends, the host's work between two steps included, so that a busy engine shows no gaps.

    A longer gap, over the step's own duration, is an idle engine and stays one.
    """
    ends = [stats.time + stats.duration for stats in steps]
    for index, following in enumerate(steps[1:]):
        if following.time - ends[index] <= steps[index].duration:
            ends[index] = following.time
    return ends


def state_of(row: RowStats) -> State:
    """What a row shows as: a verification without drafts is plain decoding."""
    return "decode" if row.kind == "verify" and not row.num_drafted else row.kind


def _extend(track: _Track, end: float, state: State) -> None:
    """Let the track be in `state` from where it ended until `end`."""
    if end <= track.since:
        return
    last = track.spans[-1] if track.spans else None
    if last is not None and last.state == state and state != "verify":
        track.spans[-1] = Span(last.start, end, state)
    else:
        track.spans.append(Span(track.since, end, state))
    track.since = end
