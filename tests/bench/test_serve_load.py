"""`aspire bench serve`: arrival times, percentiles, goodput, counters, and a run against a live server."""

import json
import math
import random
from pathlib import Path

import pytest

from aspire.bench.serve import Arrivals, Outcome, file_requests, random_requests
from aspire.bench.serve_report import (
    Report,
    percentile,
    speculation_counters,
    speculation_summary,
    summarize,
    table,
)


def test_poisson_gaps() -> None:
    """Mean rate exact; the gaps' spread is that of the gamma distribution. 20,000 gaps: the standard error of their
    coefficient of variation is below 0.01, the tolerance five times that. Planted fault: shape and scale swapped."""
    for burstiness, spread in ((1.0, 1.0), (4.0, 0.5), (0.25, 2.0)):
        times = Arrivals(50.0, burstiness).times(20_000, random.Random(1))
        gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        mean = sum(gaps) / len(gaps)
        deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert mean == pytest.approx(1 / 50)
        assert deviation / mean == pytest.approx(spread, rel=0.05)
        assert times == sorted(times)


def test_even_and_unlimited_rates() -> None:
    assert Arrivals(10.0, math.inf).times(3, random.Random(0)) == pytest.approx([0.1, 0.2, 0.3])
    assert Arrivals().times(3, random.Random(0)) == [0.0, 0.0, 0.0]


def test_ramps_go_from_rate_to_rate() -> None:
    for ramp in ("linear", "exponential"):
        times = Arrivals(ramp=ramp, burstiness=math.inf, ramp_start=1.0, ramp_end=100.0).times(101, random.Random(0))
        assert times[0] == pytest.approx(1.0)
        assert times[-1] - times[-2] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="ramp must be one of"):
        Arrivals(ramp="sudden")


def test_random_requests_vary_within_their_range() -> None:
    made = random_requests(300, (100, 40), spread=0.2, prefix=7, vocab_size=50, seed=3)
    lengths = [len(request.prompt) - 7 for request in made]
    assert min(lengths) >= 80
    assert max(lengths) <= 120
    assert len(set(lengths)) > 20
    assert {request.prompt[:7] for request in made} == {made[0].prompt[:7]}
    assert made[0].prompt[7:20] != made[1].prompt[7:20]
    assert made == random_requests(300, (100, 40), spread=0.2, prefix=7, vocab_size=50, seed=3)


def test_file_data_sets(tmp_path: Path) -> None:
    custom = tmp_path / "custom.jsonl"
    custom.write_text('{"prompt": "a", "output_tokens": 5}\n{"prompt": "b"}\n')
    assert sorted((r.prompt, r.max_tokens) for r in file_requests("custom", str(custom), 2, None, 0)) == [
        ("a", 5), ("b", 256)]
    talks = tmp_path / "talks.json"
    talks.write_text(json.dumps([{"conversations": [{"value": "q"}, {"value": "x" * 40}]}, {"conversations": []}]))
    assert [(r.prompt, r.max_tokens) for r in file_requests("sharegpt", str(talks), 2, None, 0)] == [("q", 10)] * 2
    with pytest.raises(ValueError, match="dataset_path"):
        file_requests("custom", str(tmp_path / "none"), 1, None, 0)
    custom.write_text('{"question": 1}\n')
    with pytest.raises(ValueError, match="dataset_path"):
        file_requests("custom", str(custom), 1, None, 0)


def test_percentiles_interpolate() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([0.0, 10.0], 25) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 100) == 4.0


def test_summary_and_goodput() -> None:
    """Planted fault: TPOT over all tokens instead of all but the first."""
    outcomes = [Outcome(first=0.1, latency=0.5, gaps=[0.2, 0.2], num_prompt=7, num_output=5, text="x"),
                Outcome(first=0.3, latency=0.3, num_prompt=3, num_output=1, text="y"),
                Outcome(error="HTTP 500")]
    report = Report((50.0, 90.0), ("ttft", "tpot", "itl", "e2el"), {"ttft": 200.0})
    result = summarize(outcomes, 2.0, report)
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["mean_tpot_ms"] == pytest.approx(100.0)
    assert result["mean_ttft_ms"] == pytest.approx(200.0)
    assert result["median_itl_ms"] == pytest.approx(200.0)
    assert result["p90_e2el_ms"] == pytest.approx(480.0)
    assert result["output_throughput"] == 3.0
    assert result["request_goodput"] == 0.5
    assert "P90 TTFT (ms):" in table(result, report)
    with pytest.raises(ValueError, match="metrics must be among"):
        Report(metrics=("speed",))


def test_acceptance_from_counters() -> None:
    text = ('vllm:spec_decode_num_drafts_total{engine="0"} 10.0\nvllm:spec_decode_num_draft_tokens_total{a="b"} 40.0\n'
            'vllm:spec_decode_num_accepted_tokens_total{a="b"} 30.0\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 8.0\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0\n'
            '# HELP vllm:spec_decode_num_drafts_total x\n')
    before = dict.fromkeys(speculation_counters(text), 0.0)
    summary = speculation_summary(before, speculation_counters(text))
    assert summary["spec_decode_acceptance_rate"] == 75.0
    assert summary["spec_decode_acceptance_length"] == 4.0
    assert summary["spec_decode_per_position_acceptance_rates"] == [0.9, 0.8]
    assert speculation_summary({}, {}) == {}
