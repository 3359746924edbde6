"""What a load run says: percentiles, throughput, goodput, acceptance; as a table and as one JSON object."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aspire.bench.serve import Outcome

METRICS = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)",
           "itl": "Inter-token Latency", "e2el": "End-to-end Latency"}


@dataclass(frozen=True, slots=True)
class Report:
    """percentiles: in percent. metrics: keys of METRICS to show. goodput: milliseconds allowed per metric."""

    percentiles: tuple[float, ...] = (99.0,)
    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    goodput: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name in (*self.metrics, *(self.goodput or ())):
            if name not in METRICS:
                raise ValueError(f"metrics must be among {', '.join(METRICS)}, got {name!r}")
        for value in self.percentiles:
            if not 0 <= value <= 100:
                raise ValueError(f"percentiles must be in [0, 100], got {value!r}")


def milliseconds(outcome: Outcome) -> dict[str, list[float]]:
    """The values a request contributes to each metric."""
    values: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [1e3 * gap for gap in outcome.gaps],
                                      "e2el": [1e3 * outcome.latency]}
    if outcome.first is not None:
        values["ttft"] = [1e3 * outcome.first]
        if outcome.num_output > 1:
            values["tpot"] = [1e3 * (outcome.latency - outcome.first) / (outcome.num_output - 1)]
    return values


def summarize(outcomes: Sequence[Outcome], duration: float, report: Report) -> dict[str, Any]:
    """Names follow `vllm bench serve`'s result file; times are milliseconds, `duration` seconds."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    num_input, num_output = sum(o.num_prompt for o in good), sum(o.num_output for o in good)
    result: dict[str, Any] = {
        "completed": len(good), "failed": len(outcomes) - len(good), "duration": duration,
        "total_input_tokens": num_input, "total_output_tokens": num_output,
        "request_throughput": len(good) / duration, "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration}
    values = [milliseconds(outcome) for outcome in good]
    if report.goodput:
        met = sum(all(value <= limit for name, limit in report.goodput.items() for value in one[name])
                  for one in values)
        result["request_goodput"] = met / duration
    for name in METRICS:
        together = sorted(value for one in values for value in one[name])
        result[f"mean_{name}_ms"] = sum(together) / len(together) if together else None
        result[f"median_{name}_ms"] = percentile(together, 50)
        for p in report.percentiles:
            result[f"p{p:g}_{name}_ms"] = percentile(together, p)
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Request by request, in the order of the data set; times are seconds, as in vLLM's detailed files."""
    return {"input_lens": [o.num_prompt for o in outcomes], "output_lens": [o.num_output for o in outcomes],
            "ttfts": [o.first for o in outcomes], "itls": [o.gaps for o in outcomes],
            "start_times": [o.start for o in outcomes], "latencies": [o.latency for o in outcomes],
            "generated_texts": [o.text for o in outcomes], "request_errors": [o.error for o in outcomes]}


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the ranks of ascending values; None when there are none."""
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def speculation_counters(metrics_text: str) -> dict[str, float]:
    """The vllm:spec_decode_* counters of a /metrics page, without their labels except the position."""
    counters: dict[str, float] = {}
    for line in metrics_text.splitlines():
        match = re.match(r"vllm:spec_decode_num_(\w+?)_total(?:\{(.*)\})? (\S+)$", line)
        if match:
            position = re.search(r'position="(\d+)"', match[2] or "")
            name = match[1] + (f"_{position[1]}" if position else "")
            counters[name] = counters.get(name, 0.0) + float(match[3])
    return counters


def speculation_summary(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Acceptance over the run; empty when the server counted no drafts."""
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts, drafted = gained.get("drafts", 0.0), gained.get("draft_tokens", 0.0)
    if not drafts or not drafted:
        return {}
    accepted = gained.get("accepted_tokens", 0.0)
    positions = sorted((int(name.rsplit("_", 1)[1]), value) for name, value in gained.items()
                       if name.startswith("accepted_tokens_per_pos_"))
    return {"spec_decode_acceptance_rate": 100 * accepted / drafted,
            "spec_decode_acceptance_length": 1 + accepted / drafts, "spec_decode_num_drafts": int(drafts),
            "spec_decode_draft_tokens": int(drafted), "spec_decode_accepted_tokens": int(accepted),
            "spec_decode_per_position_acceptance_rates": [value / drafts for _, value in positions]}


def table(result: Mapping[str, Any], report: Report) -> str:
    """The result as `vllm bench serve` prints it."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]), ("Failed requests:", result["failed"]),
        ("Benchmark duration (s):", result["duration"]), ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"])]
    if "request_goodput" in result:
        rows.insert(6, ("Request goodput (req/s):", result["request_goodput"]))
    lines = [_title("Serving Benchmark Result", "="), *map(_row, rows)]
    for name in report.metrics:
        short = name.upper()
        lines.append(_title(METRICS[name], "-"))
        lines += [_row((f"{kind.capitalize()} {short} (ms):", result[f"{kind}_{name}_ms"]))
                  for kind in ("mean", "median")]
        lines += [_row((f"P{p:g} {short} (ms):", result[f"p{p:g}_{name}_ms"])) for p in report.percentiles]
    if "spec_decode_acceptance_rate" in result:
        lines.append(_title("Speculative Decoding", "-"))
        lines += [_row((text, result[f"spec_decode_{name}"])) for text, name in (
            ("Acceptance rate (%):", "acceptance_rate"), ("Acceptance length:", "acceptance_length"),
            ("Drafts:", "num_drafts"), ("Draft tokens:", "draft_tokens"), ("Accepted tokens:", "accepted_tokens"))]
    return "\n".join([*lines, "=" * 50])


def _title(text: str, fill: str) -> str:
    return f" {text} ".center(50, fill)


def _row(row: tuple[str, Any]) -> str:
    text, value = row
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{text:<40} {shown:<10}".rstrip()
