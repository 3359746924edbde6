"""Draws the README's figure: the same four requests in lock step and with a decision per request.

An illustration, not a measurement: runs of accepted drafts are drawn at random with a fixed seed and the acceptance
written beside each request.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from aspire.plots.style import COLOURS, DPI, new_figure

RATES = (0.62, 0.85, 0.95, 0.98)
SHOWN = 32  # steps
LOCKSTEP_LENGTH = 6
OWN_LENGTHS = (3, 6, 12, 16)  # what pays at each acceptance


@dataclass(frozen=True, slots=True)
class Cell:
    """One step of a request: a draft, or a verification that commits `tokens`."""

    is_verification: bool
    tokens: int = 0


def play(rate: float, length: int, seed: int) -> list[Cell]:
    """A request that verifies after `length` drafts, every time."""
    chance = random.Random(seed)
    cells: list[Cell] = []
    while len(cells) < SHOWN:
        cells += [Cell(False)] * length
        accepted = 0
        while accepted < length and chance.random() < rate:
            accepted += 1
        cells.append(Cell(True, accepted + 1))
    return cells[:SHOWN]


def draw(axes: Axes, title: str, lengths: tuple[int, ...]) -> None:
    for row, (rate, length) in enumerate(zip(RATES, lengths, strict=True)):
        for step, cell in enumerate(play(rate, length, seed=row + 10)):
            colour = COLOURS["verify" if cell.is_verification else "draft"]
            axes.add_patch(Rectangle((step + 0.04, row + 0.1), 0.92, 0.8, facecolor=colour))
            if cell.is_verification:
                axes.text(step + 0.5, row + 0.5, f"+{cell.tokens}", color="white", ha="center", va="center",
                          fontsize=10, fontweight="bold")
    axes.set_xlim(0, SHOWN)
    axes.set_ylim(len(RATES), 0)
    axes.set_yticks([row + 0.5 for row in range(len(RATES))], labels=[f"accepts {rate:.0%}" for rate in RATES])
    axes.tick_params(labelsize=11, length=0)
    axes.set_title(title, fontsize=13, loc="left")
    axes.spines[:].set_visible(False)


def main() -> None:
    figure = new_figure(height=520)
    upper, lower = figure.subplots(2, 1, sharex=True)
    draw(upper, "Lock step: all draft, then all verify", (LOCKSTEP_LENGTH,) * len(RATES))
    draw(lower, "ASPIRE: each request decides at every step", OWN_LENGTHS)
    lower.set_xlabel("step of the batch (one forward pass)", fontsize=12)
    figure.legend(handles=[
        Patch(facecolor=COLOURS["draft"], label="draft: 1 token, reads a selected part of the KV cache"),
        Patch(facecolor=COLOURS["verify"], label="verify: all drafts, reads everything; +tokens it commits"),
    ], loc="outside lower center", ncols=2, fontsize=11, frameon=False)
    figure.savefig(Path(__file__).with_name("lockstep-and-aspire.png"), dpi=DPI)


if __name__ == "__main__":
    main()
