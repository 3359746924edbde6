"""Tables and JSON of measured cells."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from aspire.bench.acceptance import Cell


def describe(cell: Cell) -> dict[str, Any]:
    """The JSON object of one cell."""
    pairs = zip(cell.accepted, cell.reached, strict=True)
    return {"selection": cell.selection, "budget": cell.budget, "temperature": cell.temperature,
            "draft_length": cell.draft_length, "trials": cell.trials, "alpha": cell.alpha, "interval": cell.interval,
            "alpha_by_position": [accepted / reached if reached else None for accepted, reached in pairs],
            "trials_by_position": list(cell.reached), "rounds": cell.num_rounds, "drafts": cell.num_drafted,
            "tokens_per_verification": cell.tokens_per_verification, "wasted": cell.wasted,
            "kv_bytes_per_token": cell.kv_bytes_per_token, "kv_share": cell.kv_share, "seconds": cell.seconds}


def one_line(cell: Cell) -> str:
    """What a log says of a cell."""
    return (f"{cell.selection}, budget {cell.budget or '-'}, T {cell.temperature:g}: alpha {cell.alpha:.3f}, "
            f"{cell.tokens_per_verification:.2f} tokens a verification, {cell.trials} trials, {cell.seconds:.1f} s")


def detail_table(cells: Sequence[Cell]) -> Table:
    """A row per cell. first, last: alpha of the first and the last draft of a round."""
    table = _table("selection", "budget", "T", "trials", "alpha", "+-", "first", "last", "tokens per\nverification",
                   "wasted\ndrafts", "KV MB per\ntoken", "of plain", "seconds")
    for cell in cells:
        rates = describe(cell)["alpha_by_position"]
        low, high = cell.interval
        ends = [f"{rate:.3f}" if rate is not None else "-" for rate in (rates[0], rates[-1])]
        table.add_row(cell.selection, str(cell.budget or "-"), f"{cell.temperature:g}", str(cell.trials),
                      f"{cell.alpha:.3f}", f"{(high - low) / 2:.3f}", *ends, f"{cell.tokens_per_verification:.2f}",
                      f"{cell.wasted:.1%}", f"{cell.kv_bytes_per_token / 1e6:.2f}", f"{cell.kv_share:.1%}",
                      f"{cell.seconds:.1f}")
    return table


def summary_table(cells: Sequence[Cell], draft_length: int) -> Table:
    """A row per selection: alpha and, in brackets, tokens per verification, at each budget and temperature."""
    every = list(dict.fromkeys((cell.budget, cell.temperature) for cell in cells))
    settings = [(budget, temperature) for budget, temperature in every if budget is not None] or every
    table = _table("selection", *(f"budget {budget or '-'}\nT {temperature:g}" for budget, temperature in settings),
                   title=f"alpha (tokens per verification at draft length {draft_length})")
    for name in dict.fromkeys(cell.selection for cell in cells):
        mine = {(cell.budget, cell.temperature): cell for cell in cells if cell.selection == name}
        shown = [mine.get(setting) or mine.get((None, setting[1])) for setting in settings]
        table.add_row(name, *("-" if cell is None else f"{cell.alpha:.3f} ({cell.tokens_per_verification:.1f})"
                              for cell in shown))
    return table


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table
