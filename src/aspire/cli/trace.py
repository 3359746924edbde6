"""`aspire trace`: pictures and a Perfetto trace of a run recorded with --stats-file."""

from pathlib import Path
from typing import Annotated

import typer

from aspire.stats import StepStats, read_stats, write_trace


def trace(
    runs: Annotated[list[str], typer.Argument(metavar="RUN.jsonl...", help="Files that --stats-file wrote")],
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Where the pictures go")] = "out",
    start: Annotated[float | None, typer.Option(metavar="SECONDS", help="Left edge of the timeline")] = None,
    end: Annotated[float | None, typer.Option(metavar="SECONDS", help="Right edge of the timeline")] = None,
) -> None:
    """Draw timeline, draft lengths and acceptance (PNG and SVG), and write a trace for ui.perfetto.dev."""
    folder = Path(out)
    loaded = {Path(run).stem: load(run) for run in runs}
    if len(loaded) < len(runs):
        raise ValueError(f"runs must have different names, got {', '.join(runs)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out must be a folder that can be made, got {out!r} ({error})") from None
    for path in draw(loaded, folder, start=start, end=end):
        print(path)


def load(run: str) -> list[StepStats]:
    """The steps of a run. Raises ValueError for a file that is missing, foreign or empty."""
    try:
        steps = read_stats(run)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"runs must be readable files, got {run!r} ({error})") from None
    if not steps:
        raise ValueError(f"runs must hold at least one step, got {run!r} with none")
    return steps


def draw(runs: dict[str, list[StepStats]], folder: Path, *, start: float | None, end: float | None) -> list[Path]:
    """Write every picture and trace; returns the paths."""
    try:
        from aspire.plots.acceptance import draw_acceptance
        from aspire.plots.drafts import draw_draft_lengths
        from aspire.plots.style import save
        from aspire.plots.timeline import draw_timeline
    except ImportError as error:
        raise ValueError(f"pictures need matplotlib: pip install 'aspire-llm[plots]' ({error})") from None

    paths = []
    for name, steps in runs.items():
        paths += save(draw_timeline(steps, start=start, end=end), folder / f"{name}-timeline")
        paths += save(draw_draft_lengths(steps), folder / f"{name}-draft-lengths")
        trace_path = folder / f"{name}-trace.json"
        write_trace(trace_path, steps)
        paths.append(trace_path)
    return [*paths, *save(draw_acceptance(runs), folder / "acceptance")]
