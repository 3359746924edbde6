"""PendingStep: a launched step whose results are on their way to the host, and how they become verdicts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aspire.runtime.judges import Outcome
from aspire.sampling.logprobs import LogprobRows
from aspire.schedule.plan import Row, StepPlan, TokenLogprobs, Verdict


@dataclass(frozen=True, slots=True)
class HostOutcome:
    """An Outcome copied to host memory without waiting; `wait` returns (picks, accepted, margins) as lists."""

    numbers: Tensor  # int64 [R, K + 2] on the host: picks, then the number accepted
    margin: Tensor  # float32 [R] on the host
    done: torch.cuda.Event | None

    def wait(self) -> tuple[list[list[int]], list[int], list[float]]:
        if self.done is not None:
            self.done.synchronize()
        numbers = self.numbers.tolist()
        return [row[:-1] for row in numbers], [row[-1] for row in numbers], self.margin.tolist()


def to_host(outcome: Outcome) -> HostOutcome:
    """Start the copy; on the CPU there is nothing to wait for."""
    numbers = torch.cat([outcome.picks, outcome.num_accepted[:, None]], dim=1)
    if numbers.device.type != "cuda":
        return HostOutcome(numbers, outcome.margin, None)
    host_numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host_margin = torch.empty(outcome.margin.shape, dtype=outcome.margin.dtype, pin_memory=True)
    host_numbers.copy_(numbers, non_blocking=True)
    host_margin.copy_(outcome.margin, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return HostOutcome(host_numbers, host_margin, done)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of all picks of a step, in the order of the batch. num_top[n]: how many of the best pick n shows; -1: none."""

    rows: LogprobRows
    num_top: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of one prefill chunk. first: the chunk starts the prompt, whose first token has none."""

    rows: LogprobRows
    num_top: int
    first: bool

    def to_host(self) -> tuple[TokenLogprobs | None, ...]:
        entries = self.rows.to_host([self.num_top] * len(self.rows.token))
        return (None, *entries) if self.first else tuple(entries)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step; `verdicts` waits for it. on_verdicts: sees the host's view of plan, picks and accepted counts
    before anyone else (grammars follow the tokens)."""

    plan: StepPlan
    outcome: HostOutcome | None
    logprobs: Logprobs | None = None
    prompt_logprobs: Mapping[str, PromptLogprobs] = field(default_factory=dict)
    on_verdicts: Callable[[StepPlan, list[Verdict], list[list[int]]], None] | None = None

    def verdicts(self) -> list[Verdict]:
        """One verdict per row of the plan, in order. RuntimeError when the model's logits are not numbers."""
        if self.outcome is None:
            return []
        picks, accepted, margins = self.outcome.wait()
        entries = None if self.logprobs is None else self.logprobs.rows.to_host(
            [max(0, count) for count in self.logprobs.num_top])
        verdicts = []
        base = 0
        lost = [row.request_id for row, margin in zip(self.plan.rows, margins, strict=False)
                if row.samples and math.isnan(margin)]
        if lost:
            raise RuntimeError(f"step {self.plan.step}: the model's logits are NaN for {', '.join(lost)}")
        for i, row in enumerate(self.plan.rows):
            if not row.samples or not row.emits:
                verdicts.append(Verdict(row.request_id, draft_margin=margins[i] if row.samples else None,
                                        prompt_logprobs=self._prompt(row)))
            else:
                count = accepted[i] + 1
                shown = None
                if entries is not None and self.logprobs is not None and self.logprobs.num_top[base] >= 0:
                    shown = tuple(entries[base : base + count])
                verdicts.append(Verdict(row.request_id, tuple(picks[i][:count]), 0 if row.tokens else row.num_drafted,
                                        shown, prompt_logprobs=self._prompt(row)))
            base += num_picks(row)
        if self.on_verdicts is not None:
            self.on_verdicts(self.plan, verdicts, picks)
        return verdicts

    def _prompt(self, row: Row) -> tuple[TokenLogprobs | None, ...] | None:
        chunk = self.prompt_logprobs.get(row.request_id) if row.tokens else None
        return None if chunk is None else chunk.to_host()


def num_picks(row: Row) -> int:
    """Logits rows of a plan's row: all tokens of a decoding row, the last of a prefill that reaches its end."""
    return 0 if not row.samples else 1 if row.tokens else row.num_tokens
