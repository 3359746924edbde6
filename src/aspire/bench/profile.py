"""Where a decoding step's time goes: device time by kernel, and step times by how many rows verify.

    aspire bench throughput --shape llama-3.1-8b --batch 16 --context 32768 --replay-acceptance 0.96 --profile
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from aspire.bench.throughput import Bench, Workload
from aspire.stats import StepStats


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel's share of a mean step."""

    name: str
    calls: float
    ms: float


@dataclass(frozen=True, slots=True)
class Profile:
    """span_ms: from the first kernel's start to the last one's end, per step. busy_ms: kernels alone, per step."""

    kernels: tuple[KernelTime, ...]
    busy_ms: float
    span_ms: float
    by_verifications: dict[int, tuple[int, float]]  # number of verifying rows -> (steps, median ms)

    @property
    def idle(self) -> float:
        """Share of the time in which no kernel runs."""
        return max(0.0, 1 - self.busy_ms / self.span_ms)


def profile_steps(bench: Bench, policy: str, work: Workload, *, warm_up: int = 40, steps: int = 20,
                  trace: Path | None = None) -> Profile:
    """Profile `steps` steps of one engine after `warm_up` unprofiled ones. trace: where to write all kernels as a
    Chrome trace. Raises RuntimeError without CUDA."""
    if bench.device.type != "cuda":
        raise RuntimeError("profiling needs a CUDA device")
    engine, recorder = bench.begin(policy, work)
    for _ in range(warm_up):
        engine.advance()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recording:
        for _ in range(steps):
            engine.advance()
        torch.cuda.synchronize()
    if trace is not None:
        recording.export_chrome_trace(str(trace))
    timed = recorder.steps[8:warm_up]
    while engine.has_unfinished:
        engine.advance()
    found = _kernels(recording, steps)
    found_steps = _by_verifications(timed)
    del engine
    bench.free()
    return Profile(*found, found_steps)


def _kernels(recording: profile, steps: int) -> tuple[tuple[KernelTime, ...], float, float]:
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    first, last = float("inf"), 0.0
    for event in recording.events():
        if event.device_type.name != "CUDA":
            continue
        name = _short(event.name)
        calls[name] += 1
        seconds[name] += event.time_range.elapsed_us() / 1e3
        first, last = min(first, event.time_range.start), max(last, event.time_range.end)
    kernels = tuple(KernelTime(name, calls[name] / steps, seconds[name] / steps)
                    for name in sorted(seconds, key=lambda name: -seconds[name]))
    return kernels, sum(seconds.values()) / steps, (last - first) / 1e3 / steps


def _short(name: str) -> str:
    """A kernel's name without template arguments."""
    return re.sub(r"<.*", "", name.removeprefix("void "))[:60]


def _by_verifications(steps: Sequence[StepStats]) -> dict[int, tuple[int, float]]:
    times: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if all(row.kind != "prefill" for row in step.rows):
            times[sum(row.kind == "verify" for row in step.rows)].append(1e3 * step.duration)
    return {count: (len(found), statistics.median(found)) for count, found in sorted(times.items())}


def print_profile(result: Profile, *, most: int = 24) -> None:
    """Tables of the kernels that take longest and of the step times."""
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "calls a step", "ms a step", "share")
    for kernel in result.kernels[:most]:
        table.add_row(kernel.name, f"{kernel.calls:.1f}", f"{kernel.ms:.3f}", f"{kernel.ms / result.span_ms:.1%}")
    rest = sum(kernel.ms for kernel in result.kernels[most:])
    table.add_row(f"{max(0, len(result.kernels) - most)} more", "", f"{rest:.3f}", f"{rest / result.span_ms:.1%}")
    table.add_row("nothing runs", "", f"{result.span_ms - result.busy_ms:.3f}", f"{result.idle:.1%}")
    times = Table("verifying rows", "steps", "median ms")
    for count, (number, ms) in result.by_verifications.items():
        times.add_row(str(count), str(number), f"{ms:.3f}")
    console = Console(width=120)
    console.print(table)
    console.print(times)
