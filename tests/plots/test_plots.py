"""Spans and counts against small runs done by hand; pictures are written, large enough and labelled."""

import struct
from pathlib import Path

import pytest

from aspire.stats import RowStats, StepStats

pytest.importorskip("matplotlib")

from aspire.cli.main import run
from aspire.plots.acceptance import draw_acceptance
from aspire.plots.drafts import draw_draft_lengths
from aspire.plots.spans import Span, request_spans, step_ends
from aspire.plots.style import COLOURS, save
from aspire.plots.timeline import draw_timeline
from aspire.positions import count_positions, wilson_interval


def step(number: int, rows: tuple[RowStats, ...], **lists: tuple[str, ...]) -> StepStats:
    return StepStats(number, float(number), 0.75, rows, sum(row.num_tokens for row in rows), 0.5, 2, 1, **lists)


RUN = [
    step(0, (RowStats("a", "prefill", 8, 0, 0, 1),), arrived=("a", "b")),
    step(1, (RowStats("a", "draft", 1, 0), RowStats("b", "prefill", 3, 0, 0, 1))),
    step(2, (RowStats("a", "draft", 1, 1),)),
    step(3, (RowStats("a", "verify", 3, 2, 1, 2), RowStats("b", "verify", 1, 0, 0, 1))),
    step(4, (RowStats("b", "draft", 1, 0),), preempted=("a",)),
    step(5, (RowStats("a", "prefill", 10, 0, 0, 1), RowStats("b", "verify", 2, 1, 1, 2)), finished=("b",)),
    step(6, (RowStats("a", "verify", 1, 0, 0, 1),), finished=("a",)),
]


def test_spans_tell_what_each_request_did() -> None:
    """Planted fault: a preempted request shown as stalled until its next row."""
    assert request_spans(RUN) == {
        "a": [Span(0, 1, "prefill"), Span(1, 3, "draft"), Span(3, 4, "verify"), Span(4, 5, "preempted"),
              Span(5, 6, "prefill"), Span(6, 6.75, "decode")],
        "b": [Span(0, 1, "waiting"), Span(1, 2, "prefill"), Span(2, 3, "stalled"), Span(3, 4, "decode"),
              Span(4, 5, "draft"), Span(5, 6, "verify")],
    }


def test_an_idle_engine_leaves_a_gap() -> None:
    """Planted fault: every step stretched to the next one's start."""
    late = StepStats(7, 20.0, 0.5, (), 0, 0.0, 0, 0)
    assert step_ends([*RUN[-2:], late]) == [6.0, 6.75, 20.5]


def test_position_counts_condition_on_earlier_acceptance() -> None:
    """Planted fault: drafts after a rejection counted as reached."""
    rounds = [(3, 3), (3, 1), (2, 0), (1, 1), (0, 0)]
    counts = count_positions([step(0, tuple(RowStats(str(i), "verify", d + 1, d, a, a + 1)
                                            for i, (d, a) in enumerate(rounds)))])
    assert counts.drafted == (4, 3, 2)
    assert counts.reached == (4, 2, 1)
    assert counts.accepted == (3, 1, 1)


@pytest.mark.parametrize(("successes", "trials", "low", "high"), [
    (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (0, 0, 0.0, 1.0)])
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    """Values from the formula in Wilson (1927). Planted fault: spread not halved in the centre."""
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=2e-4)


@pytest.mark.parametrize("trials", range(1, 60))
def test_the_interval_holds_its_rate(trials: int) -> None:
    """Planted fault, found on a real run: at rate 1 the upper bound was rounded below 1, which matplotlib refuses."""
    for successes in range(trials + 1):
        low, high = wilson_interval(successes, trials)
        assert 0 <= low <= successes / trials <= high <= 1


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("draw", [draw_timeline, draw_draft_lengths, lambda steps: draw_acceptance({"run": steps})],
                         ids=["timeline", "draft lengths", "acceptance"])
@pytest.mark.parametrize("steps", [RUN, RUN[:1]], ids=["run", "one prefill"])
def test_pictures_are_1200_wide_and_have_labelled_axes(draw: object, steps: list[StepStats], tmp_path: Path) -> None:
    """Planted faults: no x label on the timeline; a run without verifications failed."""
    figure = draw(steps)  # type: ignore[operator]
    png, svg = save(figure, tmp_path / "picture")
    assert png_size(png)[0] == 1200
    assert svg.stat().st_size > 1000
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert all(axes.get_xlabel() for axes in panels)
    assert panels[0].get_ylabel()


def test_colours_stay_apart_in_grey() -> None:
    """States that touch in a timeline differ in luminance too. Planted fault: draft and prefill in equal lightness."""
    def luminance(colour: str) -> float:
        red, green, blue = (int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for one, other in (("draft", "verify"), ("draft", "decode"), ("prefill", "verify"), ("draft", "prefill"),
                       ("stalled", "waiting")):
        assert abs(luminance(COLOURS[one]) - luminance(COLOURS[other])) > 0.1, (one, other)


def test_trace_command_draws_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: two runs overwrote each other's pictures."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("".join(stats.to_json() + "\n" for stats in RUN))
    status = run(["trace", str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl"), "--out", str(tmp_path / "out")])
    assert status == 0
    written = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert len(written) == 12
    assert written == {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("content", [None, "", "not json\n"], ids=["missing", "empty", "foreign"])
def test_trace_command_refuses_what_is_no_run(content: str | None, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: an empty file drew empty pictures."""
    if content is not None:
        (tmp_path / "x.jsonl").write_text(content)
    assert run(["trace", str(tmp_path / "x.jsonl"), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aspire: error: ")
    assert error.count("\n") == 1
    assert "x.jsonl" in error
