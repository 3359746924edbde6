"""StepStats round-trips, and each observer shows what happened."""

import io
import json
from pathlib import Path

import pytest

from aspire.schedule.plan import Row, RowKind, StepPlan, Verdict
from aspire.stats import JsonLines, LogLine, RowStats, StepStats, Trace, read_stats, row_stats


def make_step(step: int = 0, **changes: object) -> StepStats:
    rows = (RowStats("a", "verify", 4, 3, 2, 3), RowStats("b", "draft", 1, 5), RowStats("c", "prefill", 7, 0, 0, 1))
    values: dict[str, object] = {"time": 0.5 + step, "duration": 0.25, "rows": rows, "tokens": 12, "kv_usage": 0.5,
                                 "running": 3, "waiting": 1, "arrived": ("c",), "preempted": ("d",), "finished": ("a",)}
    return StepStats(step=step, **(values | changes))  # type: ignore[arg-type]


def test_rows_tell_prefill_draft_and_verify_apart() -> None:
    """Planted fault: num_accepted taken from a draft row's verdict under a lossy policy counted it as accepted."""
    plan = StepPlan(3, (Row("a", 0, RowKind.FULL, 10, 4, 3, True), Row("b", 1, RowKind.SPARSE, 20, 1, 5, True),
                        Row("c", 2, RowKind.FULL, 0, 7, 0, True, tokens=tuple(range(7)))))
    verdicts = [Verdict("a", (1, 2, 3), 3), Verdict("b"), Verdict("c", (9,))]
    assert row_stats(plan, verdicts) == make_step().rows


def test_totals_count_verified_drafts_only() -> None:
    """Planted fault: the draft row's five earlier drafts counted as verified."""
    step = make_step()
    assert (step.num_drafted, step.num_accepted, step.num_emitted) == (3, 2, 4)


def test_json_lines_round_trip(tmp_path: Path) -> None:
    """Planted fault: lists not turned back into tuples make the steps unequal."""
    steps = [make_step(0), make_step(1, preempted=()), make_step(2, offloaded=5, restored=3)]
    observer = JsonLines(tmp_path / "run.jsonl")
    for step in steps:
        observer.on_step(step)
    observer.close()
    assert read_stats(tmp_path / "run.jsonl") == steps


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Planted fault: `offloaded` without a default."""
    fields = json.loads(make_step().to_json())
    del fields["offloaded"], fields["restored"]
    (tmp_path / "old.jsonl").write_text(json.dumps(fields) + "\n")
    assert read_stats(tmp_path / "old.jsonl") == [make_step()]


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', "3"])
def test_foreign_file_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    """Planted fault: AttributeError escaped for a line that is valid JSON but no object."""
    (tmp_path / "x.jsonl").write_text(make_step().to_json() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2 must be"):
        read_stats(tmp_path / "x.jsonl")


def test_trace_is_json_with_one_track_per_request(tmp_path: Path) -> None:
    """Planted fault: the process names repeated in every step."""
    trace = Trace(tmp_path / "t.json")
    trace.on_step(make_step(0))
    trace.on_step(make_step(1))
    trace.close()
    events = json.loads((tmp_path / "t.json").read_text())
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["engine", "requests", "c", "a", "b"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert [event["name"] for event in spans[:3]] == ["verify 2/3", "draft 6", "prefill 7"]
    assert {event["tid"] for event in spans} == {1, 2, 3}
    assert spans[3]["ts"] - spans[0]["ts"] == 1e6


def test_empty_trace_is_valid(tmp_path: Path) -> None:
    """Planted fault: closing without a step wrote a lone bracket."""
    Trace(tmp_path / "t.json").close()
    assert json.loads((tmp_path / "t.json").read_text()) == []


def test_log_line_reports_rates_once_per_interval() -> None:
    """Planted fault: counts not reset after a line doubled the second rate."""
    out = io.StringIO()
    observer = LogLine(out, interval=1.0)
    for step in range(4):
        observer.on_step(make_step(step))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == ("step 1: 6.4 tokens/s, acceptance 66.7%, running 3, waiting 1, KV 50.0%")
    assert "4.0 tokens/s" in lines[1]
