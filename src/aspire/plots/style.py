"""Colours and figure sizes. The palette is Okabe and Ito's, told apart by people with any colour vision."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {
    "prefill": "#56B4E9",
    "draft": "#F0C36D",
    "verify": "#0072B2",
    "decode": "#009E73",
    "stalled": "#D9D9D9",
    "waiting": "#999999",
    "preempted": "#D55E00",
}
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HEAT = "Blues"
DPI = 100


def new_figure(*, width: int = 1200, height: int = 600) -> Figure:
    """An empty figure of that many pixels."""
    return Figure(figsize=(width / DPI, height / DPI), dpi=DPI, layout="constrained")


def tidy(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Titles, labels and a light grid, at sizes legible at 1200 pixels."""
    axes.set_title(title, fontsize=13, loc="left")
    axes.set_xlabel(x, fontsize=12)
    axes.set_ylabel(y, fontsize=12)
    axes.tick_params(labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write the picture as PNG and SVG beside each other; `path` has no suffix. Returns what was written."""
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for one in paths:
        figure.savefig(one, dpi=DPI)
    return paths
