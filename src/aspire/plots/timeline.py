"""Timeline of a batch: each request a row, what it does in colours."""

from collections.abc import Sequence

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from aspire.plots.spans import STATES, State, request_spans
from aspire.plots.style import COLOURS, new_figure, tidy
from aspire.stats import StepStats

LABELS: dict[State, str] = {"prefill": "prefill", "draft": "draft", "verify": "verify", "decode": "decode, no drafts",
                            "stalled": "no row in the step", "waiting": "waiting", "preempted": "preempted"}
THIN = ("stalled", "waiting", "preempted")
MAX_NAMED = 48


def draw_timeline(steps: Sequence[StepStats], *, start: float | None = None, end: float | None = None) -> Figure:
    """The requests of a run over time, seconds; `start` and `end` cut a window out."""
    rows = {request_id: [span for span in spans if (end is None or span.start < end)
                         and (start is None or span.end > start)]
            for request_id, spans in request_spans(steps).items()}
    rows = {request_id: spans for request_id, spans in rows.items() if spans}
    figure = new_figure(height=min(1600, 210 + max(16, 26 - len(rows) // 4) * max(4, len(rows))))
    axes = figure.subplots()
    for state in STATES:
        height = 0.3 if state in THIN else 0.86
        boxes = [Rectangle((span.start, row - height / 2), span.end - span.start, height)
                 for row, spans in enumerate(rows.values()) for span in spans if span.state == state]
        axes.add_collection(PatchCollection(boxes, facecolor=COLOURS[state], edgecolor="none"))
    preemptions = [(span.start, row) for row, spans in enumerate(rows.values()) for span in spans
                   if span.state == "preempted"]
    axes.scatter([time for time, _ in preemptions], [row for _, row in preemptions], marker="v", s=60, zorder=3,
                 color=COLOURS["preempted"], edgecolor="white")
    tidy(axes, title="", x="time, seconds", y="request")
    if len(rows) <= MAX_NAMED:
        axes.set_yticks(range(len(rows)), labels=list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    first = min((spans[0].start for spans in rows.values()), default=0.0)
    last = max((spans[-1].end for spans in rows.values()), default=1.0)
    axes.set_xlim(first if start is None else start, last if end is None else end)
    seen = [state for state in STATES if any(span.state == state for spans in rows.values() for span in spans)]
    figure.suptitle("What each request does in each step", fontsize=13, x=0.01, ha="left")
    figure.legend(handles=[Patch(facecolor=COLOURS[state], label=LABELS[state]) for state in seen], ncols=len(STATES),
                  loc="outside lower center", frameon=False, fontsize=11)
    return figure
