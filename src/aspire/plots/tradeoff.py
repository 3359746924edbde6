"""Acceptance against what it costs to read."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from aspire.plots.style import MARKERS, SERIES, new_figure, tidy


@dataclass(frozen=True, slots=True)
class Point:
    """share: of plain decoding's KV bytes that are read per token; interval: of alpha."""

    series: str
    label: str
    share: float
    alpha: float
    interval: tuple[float, float]
    chosen: bool = False


def draw_tradeoff(points: Sequence[Point], *, title: str) -> Figure:
    """Alpha over the share of KV bytes, a colour per series; the chosen point is ringed."""
    figure = new_figure(height=620)
    axes = figure.subplots()
    for index, name in enumerate(dict.fromkeys(point.series for point in points)):
        mine = sorted((point for point in points if point.series == name), key=lambda point: point.share)
        low = [point.alpha - point.interval[0] for point in mine]
        high = [point.interval[1] - point.alpha for point in mine]
        axes.errorbar([point.share for point in mine], [point.alpha for point in mine], yerr=[low, high], capsize=3,
                      linestyle="none", elinewidth=0.8, markersize=7, label=name, color=SERIES[index % len(SERIES)],
                      marker=MARKERS[(index + index // len(SERIES)) % len(MARKERS)])
        for point in mine:
            axes.annotate(point.label, (point.share, point.alpha), textcoords="offset points", xytext=(7, -13),
                          fontsize=9, color="#404040")
    for point in points:
        if point.chosen:
            axes.plot([point.share], [point.alpha], "o", markersize=20, markerfacecolor="none", markeredgewidth=2,
                      color="#000000", label="chosen")
    tidy(axes, title=title, x="KV bytes read per token, as a share of plain decoding's",
         y="chance that a draft is accepted")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=11, title="bars: 95 % interval")
    return figure
