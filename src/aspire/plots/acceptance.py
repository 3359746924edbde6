"""Acceptance against a draft's position in its round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aspire.plots.style import MARKERS, SERIES, new_figure, tidy
from aspire.stats import StepStats

Z = 1.96  # normal quantile of a 95 % interval


@dataclass(frozen=True, slots=True)
class PositionCounts:
    """Index j - 1 is position j. reached: rounds whose drafts before j were all accepted, and that drafted j;
    accepted: of those, how often j was accepted too; drafted: rounds that drafted j at all."""

    drafted: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]


def count_positions(steps: Sequence[StepStats]) -> PositionCounts:
    """Counts over the verifications of a run."""
    rounds = [(row.num_drafted, row.num_accepted) for stats in steps for row in stats.rows if row.kind == "verify"]
    longest = max((drafted for drafted, _ in rounds), default=0)
    positions = range(1, longest + 1)
    return PositionCounts(
        tuple(sum(drafted >= j for drafted, _ in rounds) for j in positions),
        tuple(sum(drafted >= j and accepted >= j - 1 for drafted, accepted in rounds) for j in positions),
        tuple(sum(accepted >= j for _, accepted in rounds) for j in positions),
    )


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Bounds of a 95 % interval of a proportion (Wilson 1927)."""
    if trials == 0:
        return 0.0, 1.0
    rate, spread = successes / trials, Z * Z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = Z * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials)) / (1 + spread)
    return min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half))  # the rate is inside, rounding or not


def draw_acceptance(runs: Mapping[str, Sequence[StepStats]]) -> Figure:
    """Per run: the chance that the draft at a position is accepted, given those before it were (left), and the share
    of rounds in which all drafts up to a position were accepted (right)."""
    figure = new_figure(height=520)
    left, right = figure.subplots(1, 2, sharey=True)
    for index, (label, steps) in enumerate(runs.items()):
        counts = count_positions(steps)
        style = {"color": SERIES[index % len(SERIES)], "marker": MARKERS[index % len(MARKERS)], "label": label}
        _draw_rates(left, counts.accepted, counts.reached, style)
        _draw_rates(right, counts.accepted, counts.drafted, style)
    tidy(left, title="Accepted, given all before it were", x="position of the draft", y="probability")
    tidy(right, title="All drafts up to here accepted", x="position of the draft", y="")
    for axes in (left, right):
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend(loc="lower left", fontsize=11, title="bars: 95 % interval")
    return figure


def _draw_rates(axes: object, accepted: Sequence[int], trials: Sequence[int], style: dict[str, str]) -> None:
    points = [(j, a / n, wilson_interval(a, n)) for j, (a, n) in enumerate(zip(accepted, trials, strict=True), start=1)
              if n]
    rates = [rate for _, rate, _ in points]
    errors = [[rate - low for _, rate, (low, _) in points], [high - rate for _, rate, (_, high) in points]]
    axes.errorbar([j for j, _, _ in points], rates, yerr=errors, capsize=3, linewidth=1.6,  # type: ignore[attr-defined]
                  markersize=6, elinewidth=1, **style)
