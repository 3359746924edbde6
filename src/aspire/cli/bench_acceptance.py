"""`aspire bench acceptance`: how often selections' drafts are accepted on real text; tables, JSON and pictures."""

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from aspire.cli.options import ENGINE_FLAGS, Group, read_json_fields, with_flags
from aspire.progress import no_progress, terminal_progress

if TYPE_CHECKING:
    from aspire.bench.acceptance import Cell, Lab
    from aspire.bench.selections import Variant

WIDTH = 130


@with_flags(engine=ENGINE_FLAGS)
def acceptance(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, GGUF file or smollm2-135m")],
    selections: Annotated[str, typer.Option(
        metavar="NAMES", help="Comma-separated presets and variants, or all; default: the presets and the variants "
        "that matter most")] = "",
    data: Annotated[list[str] | None, typer.Option(
        metavar="FILE", help="JSON lines with question and answer; may be repeated; default: shipped problems")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Contexts, each another window of the data")] = 4,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each context")] = 2048,
    budget: Annotated[list[int] | None, typer.Option(
        metavar="N", help="Tokens read in a layer with a list; may be repeated; default 512 and 256")] = None,
    temperature: Annotated[list[float] | None, typer.Option(
        metavar="T", help="May be repeated; default 0 and 0.8")] = None,
    drafts: Annotated[int, typer.Option(min=1, help="Drafts before each verification")] = 16,
    min_trials: Annotated[int, typer.Option(
        min=1, help="Drafts with known outcome of each cell, at least")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the contexts and the sampling noise")] = 0,
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="Where pictures and cells.jsonl go")] = None,
    *,
    engine: Group,
) -> None:
    """Measure acceptance by position, tokens per verification, KV bytes per token and wasted drafts."""
    from aspire.bench.acceptance import Lab, Work, tokens_for
    from aspire.bench.acceptance_report import describe, detail_table, summary_table
    from aspire.bench.contexts import Windows, read_problems
    from aspire.bench.selections import DEFAULT_SELECTIONS, find_selections
    from aspire.build import load
    from aspire.config import EngineConfig
    from aspire.samples import gsm8k_sample

    for name in ("policy", "max_num_seqs", "max_model_len", "enable_prefix_caching", "calibration"):
        if name in engine:
            raise ValueError(f"{name} is set by this benchmark and must not be given, got {engine[name]!r}")
    folder = _folder(out)
    variants = find_selections([name.strip() for name in selections.split(",")] if selections else DEFAULT_SELECTIONS)
    problems = [problem for file in data for problem in read_problems(file)] if data else gsm8k_sample()
    options: Any = read_json_fields(engine)
    changes = options.pop("overrides", None)
    loaded = load(EngineConfig.from_options(model, options),
                  progress=terminal_progress if sys.stderr.isatty() else no_progress)
    contexts = Windows(problems, loaded.tokenizer).contexts(batch, context, seed=seed)
    tokens = tokens_for(min_trials, batch, drafts)
    lab = Lab(loaded, Work(tuple(tuple(one) for one in contexts), drafts, tokens, seed), options)
    cells = run_cells(lab, variants, budgets=budget or [512, 256], temperatures=temperature or [0.0, 0.8],
                      changes=changes, out=folder)
    console = Console()
    console = Console(width=max(WIDTH, console.width))
    console.print(detail_table(cells))
    console.print(summary_table(cells, drafts))
    for path in _draw(cells, drafts, folder):
        print(path)
    print(json.dumps({"bench": "acceptance", "model": model, "device": loaded.device.type,
                      "dtype": loaded.config.model.dtype, "batch_invariant": loaded.config.model.batch_invariant,
                      "context": context, "batch": batch, "tokens": tokens,
                      "cells": [describe(cell) for cell in cells]}))


def run_cells(lab: "Lab", variants: "dict[str, Variant]", *, budgets: Sequence[int], temperatures: Sequence[float],
              changes: Any, out: Path | None) -> "list[Cell]":
    """All cells, each told on stderr and written to cells.jsonl as it is done, so that an ended run leaves its part.
    Refused overrides are refused before anything runs."""
    from dataclasses import replace

    from aspire.bench.acceptance_report import describe, one_line
    from aspire.speculation.policy import Overrides

    given = changes or Overrides()
    plan: list[tuple[str, Any, int | None]] = []
    for name, variant in variants.items():
        if not variant.budgets:
            plan.append((name, lab.policy(variant), None))
            continue
        fixed = [given.budget] if given.budget else budgets
        plan += [(name, lab.policy(variant, replace(given, budget=one)), one) for one in fixed]
    lines = (out / "cells.jsonl").open("w", encoding="utf-8") if out else None

    def report(cell: "Cell") -> None:
        print(one_line(cell), file=sys.stderr, flush=True)
        if lines is not None:
            print(json.dumps(describe(cell)), file=lines, flush=True)

    print(f"contexts computed in {lab.prefill():.1f} s", file=sys.stderr, flush=True)
    cells: list[Cell] = []
    try:
        with terminal_progress("Selections", len(plan)) as advance:
            for name, policy, budget in plan:
                cells += lab.measure(name, policy, temperatures, budget=budget, report=report)
                advance(1)
    finally:
        if lines is not None:
            lines.close()
    return cells


def _folder(out: str | None) -> Path | None:
    """The folder, made; refused, if it cannot be or if pictures cannot be drawn, before minutes are spent."""
    if out is None:
        return None
    if find_spec("matplotlib") is None:
        raise ValueError("out needs matplotlib for its pictures: pip install 'aspire-llm[plots]'")
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out must be a folder that can be made, got {out!r} ({error})") from None
    return Path(out)


def _draw(cells: "list[Cell]", drafts: int, folder: Path | None) -> list[Path]:
    """A picture by position for each budget and temperature, and one of acceptance against KV bytes for each
    temperature."""
    if folder is None:
        return []
    from aspire.plots.acceptance import draw_counts
    from aspire.plots.style import save
    from aspire.plots.tradeoff import Point, draw_tradeoff
    from aspire.positions import PositionCounts

    paths: list[Path] = []
    for temperature in dict.fromkeys(cell.temperature for cell in cells):
        mine = [cell for cell in cells if cell.temperature == temperature]
        suffix = f"t{temperature:g}".replace(".", "_")
        for budget in dict.fromkeys(cell.budget for cell in mine if cell.budget is not None):
            shown = [cell for cell in mine if cell.budget in (None, budget)]
            counts = {cell.selection: PositionCounts((cell.num_rounds,) * drafts, cell.reached, cell.accepted)
                      for cell in shown}
            paths += save(draw_counts(counts), folder / f"position-budget{budget}-{suffix}")
        points = [Point(cell.selection, str(cell.budget or ""), cell.kv_share, cell.alpha, cell.interval)
                  for cell in mine]
        paths += save(draw_tradeoff(points, title=f"Acceptance against KV bytes, T = {temperature:g}"),
                      folder / f"tradeoff-{suffix}")
    return paths
