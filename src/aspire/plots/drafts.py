"""How long drafts are when they are verified: per request, and over time."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aspire.plots.style import HEAT, new_figure, tidy
from aspire.stats import RowStats, StepStats

TIME_BINS = 60
MAX_NAMED = 40


def verifications(steps: Sequence[StepStats]) -> list[tuple[float, RowStats]]:
    """(time, row) of every verification, plain decoding (no drafts) included."""
    return [(stats.time, row) for stats in steps for row in stats.rows if row.kind == "verify"]


def draw_draft_lengths(steps: Sequence[StepStats]) -> Figure:
    """Left: share of each draft length, per request. Right: the same over time, with mean drafted and accepted."""
    seen = verifications(steps)
    longest = max((row.num_drafted for _, row in seen), default=0)
    names = list(dict.fromkeys(row.request_id for stats in steps for row in stats.rows))
    figure = new_figure(height=min(1200, 330 + 18 * max(10, min(len(names), MAX_NAMED))))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_requests(left, seen, names, longest)
    _draw_time(right, seen, longest)
    for axes in (left, right):
        bar = figure.colorbar(axes.images[0], ax=axes, fraction=0.05, pad=0.02)
        bar.set_label("share of verifications", fontsize=11)
        bar.ax.tick_params(labelsize=10)
    return figure


def _draw_requests(axes: Axes, seen: list[tuple[float, RowStats]], names: list[str], longest: int) -> None:
    counts = np.zeros((max(1, len(names)), longest + 1))
    place = {name: index for index, name in enumerate(names)}
    for _, row in seen:
        counts[place[row.request_id], row.num_drafted] += 1
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(share, cmap=HEAT, vmin=0, aspect="auto", interpolation="nearest")
    tidy(axes, title="Draft length, per request", x="drafts in a verification", y="request")
    if len(names) <= MAX_NAMED:
        axes.set_yticks(range(len(names)), labels=names)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_time(axes: Axes, seen: list[tuple[float, RowStats]], longest: int) -> None:
    times = np.array([time for time, _ in seen] or [0.0])
    drafted = np.array([row.num_drafted for _, row in seen] or [0])
    accepted = np.array([row.num_accepted for _, row in seen] or [0])
    edges = np.linspace(times.min(), max(times.max(), times.min() + 1e-9), TIME_BINS + 1)
    counts, _, _ = np.histogram2d(times, drafted, bins=(edges, np.arange(longest + 2) - 0.5))
    total = counts.sum(axis=1)
    share = np.ma.masked_invalid(np.where(total[:, None] > 0, counts / np.maximum(total[:, None], 1), np.nan))
    # A bin with a single verification would else set the scale of all.
    brightest = max(float(np.quantile(share.compressed(), 0.995)), 0.05)
    axes.imshow(share.T, cmap=HEAT, vmin=0, vmax=brightest, aspect="auto", origin="lower", interpolation="nearest",
                extent=(edges[0], edges[-1], -0.5, longest + 0.5))
    middle = (edges[:-1] + edges[1:]) / 2
    filled = total > 0
    for values, label, style in ((drafted, "mean drafted", "-"), (accepted, "mean accepted", ":")):
        sums, _ = np.histogram(times, bins=edges, weights=values)
        axes.plot(middle[filled], sums[filled] / total[filled], style, color="white", linewidth=4, alpha=0.8)
        axes.plot(middle[filled], sums[filled] / total[filled], style, color="#D55E00", linewidth=2, label=label)
    tidy(axes, title="Draft length, over time", x="time, seconds", y="drafts in a verification")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left", fontsize=11, framealpha=0.9)
