"""Acceptance against a draft's position in its round."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aspire.plots.style import MARKERS, SERIES, new_figure, tidy
from aspire.positions import PositionCounts, count_positions, wilson_interval
from aspire.stats import StepStats


def draw_acceptance(runs: Mapping[str, Sequence[StepStats]]) -> Figure:
    """`draw_counts` of runs."""
    return draw_counts({label: count_positions(steps) for label, steps in runs.items()})


def draw_counts(runs: Mapping[str, PositionCounts]) -> Figure:
    """Per run: the chance that the draft at a position is accepted, given those before it were (left), and the share
    of rounds in which all drafts up to a position were accepted (right)."""
    figure = new_figure(height=520)
    left, right = figure.subplots(1, 2)
    for index, (label, counts) in enumerate(runs.items()):
        marker = MARKERS[(index + index // len(SERIES)) % len(MARKERS)]
        style = {"color": SERIES[index % len(SERIES)], "marker": marker, "label": label}
        shift = 0.1 * (index - (len(runs) - 1) / 2)  # so that bars of several runs stand side by side
        _draw_rates(left, counts.accepted, counts.reached, style, shift=shift)
        _draw_rates(right, counts.accepted, counts.drafted, style, shift=shift)
    tidy(left, title="Accepted, given all before it were", x="position of the draft", y="probability")
    tidy(right, title="All drafts up to here accepted", x="position of the draft", y="share of rounds")
    left.set_ylim(min(0.9, max(0.0, left.get_ylim()[0])), 1.01)
    right.set_ylim(0, 1.02)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.legend(loc="lower left", fontsize=11, title="bars: 95 % interval")
    return figure


def _draw_rates(axes: object, accepted: Sequence[int], trials: Sequence[int], style: dict[str, str], *,
                shift: float) -> None:
    points = [(j, a / n, wilson_interval(a, n)) for j, (a, n) in enumerate(zip(accepted, trials, strict=True), start=1)
              if n]
    rates = [rate for _, rate, _ in points]
    errors = [[rate - low for _, rate, (low, _) in points], [high - rate for _, rate, (_, high) in points]]
    axes.errorbar([j + shift for j, _, _ in points], rates, yerr=errors, capsize=3, linewidth=1.6,  # type: ignore[attr-defined]
                  markersize=6, elinewidth=1, **style)
