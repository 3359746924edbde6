"""`aspire calibrate`: measures a model on this machine and writes what engines should use."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aspire.cli.options import ENGINE_FLAGS, Group, calibration_folder, read_json_fields, with_flags
from aspire.progress import terminal_progress

if TYPE_CHECKING:
    from aspire.calibrate.run import Outcome

CHOSEN_HERE = ("policy", "judge", "calibration", "overrides", "max_num_seqs", "max_model_len",
               "enable_prefix_caching", "num_blocks")
FLAGS = tuple(flag for flag in ENGINE_FLAGS if flag.name not in CHOSEN_HERE)


@with_flags(engine=FLAGS)
def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, GGUF file or smollm2-135m")],
    batch: Annotated[int, typer.Option(min=1, help="Requests at once to choose for")] = 16,
    context: Annotated[int, typer.Option(min=64, help="Tokens of context to choose for and to measure on")] = 2048,
    requests: Annotated[int | None, typer.Option(
        min=1, help="Contexts to measure on; default 24, on the CPU 3, at most --batch")] = None,
    budget: Annotated[list[int] | None, typer.Option(
        min=16, metavar="N", help="Budget to choose from, tokens; may be repeated; default 512, 256, 128 and 1024, as "
        "far as they are at most half of the context")] = None,
    temperature: Annotated[float, typer.Option(min=0, metavar="T")] = 0.8,
    data: Annotated[list[str] | None, typer.Option(
        metavar="FILE", help="JSON lines with question and answer; may be repeated; default: shipped problems")] = None,
    max_minutes: Annotated[float, typer.Option(min=0.01, help="Stop measuring after so long")] = 10.0,
    drafts: Annotated[int | None, typer.Option(
        min=1, help="Longest round to consider; default the draft limit of the policy aspire")] = None,
    output: Annotated[str | None, typer.Option(
        metavar="FILE", help="Where to write; default: the cache directory, where other commands find it")] = None,
    *,
    engine: Group,
) -> None:
    """Choose refresh layers and budget for the most tokens per second, and fit the cost of steps on this machine."""
    from aspire.bench.acceptance import Lab, Work, tokens_for
    from aspire.bench.contexts import Windows, read_problems
    from aspire.build import load
    from aspire.calibrate.forecast import Target
    from aspire.calibrate.run import Calibrator, Plan
    from aspire.config import EngineConfig
    from aspire.samples import gsm8k_sample
    from aspire.speculation.policy import PRESETS

    budgets, drafts = _budgets(budget, context), drafts or PRESETS["aspire"].drafts
    path = None if output is None else _writable(Path(output))
    problems = [problem for file in data for problem in read_problems(file)] if data else gsm8k_sample()
    options: Any = read_json_fields(engine)
    loaded = load(EngineConfig.from_options(model, options), progress=terminal_progress)
    count = min(batch, requests or (3 if loaded.device.type == "cpu" else 24))
    contexts = Windows(problems, loaded.tokenizer).contexts(count, context, seed=0)
    tokens = max(1, min(tokens_for(2000, count, drafts), loaded.spec.max_model_len - context - drafts))
    work = Work(tuple(tuple(one) for one in contexts), drafts, tokens)
    plan = Plan(Target(batch, context), budgets, temperature, 60.0 * max_minutes)
    outcome = Calibrator(Lab(loaded, work, options), plan).run(terminal_progress)
    path = path or _writable(calibration_folder() / outcome.calibration.key.file_name)
    outcome.calibration.save(path)
    show(outcome)
    picture = _draw(outcome, path)
    print(f"written to {path}" + (f", picture {picture}" if picture else ""))
    print(json.dumps({"calibrate": model, "file": str(path), "refresh": list(outcome.calibration.refresh),
                      "budget": outcome.calibration.budget, "draft_length": outcome.calibration.draft_length,
                      "tokens_per_second": outcome.calibration.tokens_per_second,
                      "plain_tokens_per_second": outcome.calibration.plain_tokens_per_second,
                      "step_error": outcome.step_error, "per_scoring": outcome.per_scoring,
                      "seconds": outcome.seconds, "complete": outcome.complete}))


def _budgets(given: list[int] | None, context: int) -> tuple[int, ...]:
    """Those given, in their order; else the default ones that leave something out."""
    if given:
        return tuple(dict.fromkeys(given))
    return tuple(one for one in (512, 256, 128, 1024) if 2 * one <= context) or (max(16, context // 4),)


def _writable(path: Path) -> Path:
    """Refused before minutes are spent; nothing is written yet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output must be a file that can be written, got {str(path)!r} ({error})") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"output must be a file that can be written, got {str(path)!r}")
    return path


def show(outcome: "Outcome") -> None:
    """The candidates from best to worst, the chosen one and the prices of a step."""
    chosen = outcome.calibration
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("refresh layers", "budget", "alpha", "+-", "trials", "KV of\nplain", "best\ndrafts",
                 "tokens/s\nforecast"):
        table.add_column(name, justify="left" if name == "refresh layers" else "right")
    for one in sorted(outcome.measured, key=lambda one: -one.forecast.tokens_per_second):
        low, high = one.cell.interval
        mark = "bold" if (one.candidate.refresh, one.candidate.budget) == (chosen.refresh, chosen.budget) else ""
        table.add_row(", ".join(map(str, one.candidate.refresh)) or "none", str(one.candidate.budget),
                      f"{one.cell.alpha:.3f}", f"{(high - low) / 2:.3f}", str(one.cell.trials),
                      f"{one.cell.kv_share:.1%}", str(one.forecast.draft_length),
                      f"{one.forecast.tokens_per_second:.1f}", style=mark)
    console = Console()
    Console(width=max(90, console.width)).print(table)
    print(f"step: {1e3 * chosen.base:.3f} ms + max({1e3 * chosen.weights:.3f} ms, {1e6 * chosen.per_token:.2f} us a "
          f"token) + {1e12 * chosen.per_byte:.3f} ms a GB of KV; mean error {outcome.step_error:.1%}")
    print(f"batch {chosen.batch}, context {chosen.context}: {chosen.tokens_per_second:.1f} tokens/s expected, "
          f"{chosen.plain_tokens_per_second:.1f} by plain decoding; {outcome.seconds:.0f} s"
          + ("" if outcome.complete else ", stopped by --max-minutes"))


def _draw(outcome: "Outcome", path: Path) -> Path | None:
    """Acceptance against KV bytes beside the file; None, with a word, without matplotlib."""
    try:
        from aspire.plots.style import save
        from aspire.plots.tradeoff import Point, draw_tradeoff
    except ImportError:
        print("no picture: pip install 'aspire-llm[plots]'", file=sys.stderr)
        return None

    chosen = outcome.calibration
    points = []
    for one in outcome.measured:
        refresh, budget = one.candidate.refresh, one.candidate.budget
        is_chosen = (refresh, budget) == (chosen.refresh, chosen.budget)
        label = f"{'+'.join(map(str, refresh)) or 'none'}, budget {budget}" if is_chosen else ""
        points.append(Point(f"{len(refresh)} refresh layers", label, one.cell.kv_share, one.cell.alpha,
                            one.cell.interval, is_chosen))
    points.sort(key=lambda point: point.series)
    title = f"Calibration of {chosen.key.model} on {chosen.key.device}"
    return save(draw_tradeoff(points, title=title), path)[0]
