"""PendingStep: a launched step whose results are on their way to the host, and how they become verdicts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aspire.runtime.judges import Outcome
from aspire.runtime.staging import Staging
from aspire.sampling.logprobs import LogprobRows
from aspire.schedule.plan import Row, StepPlan, TokenLogprobs, Verdict


@dataclass(frozen=True, slots=True)
class HostOutcome:
    """A packed outcome on its way to host memory."""

    numbers: Tensor  # int64 [R, K + 3] on the host
    done: torch.cuda.Event | None

    def wait(self, num_rows: int) -> tuple[list[list[int]], list[float]]:
        """Of the first rows: picks, the number accepted, one number of no use; and the margins."""
        if self.done is not None:
            self.done.synchronize()
        numbers = self.numbers[:num_rows]
        margins: list[float] = numbers[:, -1].view(torch.float64).tolist()
        return numbers.tolist(), margins


def pack_outcome(outcome: Outcome) -> Tensor:
    """All of it in one tensor, int64 [R, K + 3]: picks, the number accepted, the bits of the margin as float64."""
    margin = outcome.margin.double().view(torch.int64)
    return torch.cat([outcome.picks, outcome.num_accepted[:, None], margin[:, None]], dim=1)


def to_host(packed: Tensor, staging: Staging) -> HostOutcome:
    """Start the copy of a packed outcome; on the CPU there is nothing to wait for. The host's memory is used again
    by the third step after this one, when this one's verdicts have long been read."""
    if packed.device.type != "cuda":
        return HostOutcome(packed, None)
    numbers = staging.claim(packed.numel()).view(packed.shape)
    numbers.copy_(packed, non_blocking=True)
    return HostOutcome(numbers, staging.mark())


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
    """A launched step; `verdicts` waits for it. on_verdicts: sees the plan, its verdicts and each row's picks
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
        rows = self.plan.rows
        numbers, margins = self.outcome.wait(len(rows))
        if any(map(math.isnan, margins)):
            self._refuse_nan(margins)
        verdicts = [_verdict(row, chosen, margin) for row, chosen, margin in zip(rows, numbers, margins, strict=True)]
        if self.logprobs is not None:
            verdicts = self._with_logprobs(verdicts, self.logprobs)
        if self.prompt_logprobs:
            verdicts = [verdict._replace(prompt_logprobs=self._prompt(row))
                        for row, verdict in zip(rows, verdicts, strict=True)]
        if self.on_verdicts is not None:
            self.on_verdicts(self.plan, verdicts, numbers)
        return verdicts

    def _refuse_nan(self, margins: Sequence[float]) -> None:
        lost = [row.request_id for row, margin in zip(self.plan.rows, margins, strict=True)
                if row.samples and math.isnan(margin)]
        if lost:
            raise RuntimeError(f"step {self.plan.step}: the model's logits are NaN for {', '.join(lost)}")

    def _with_logprobs(self, verdicts: list[Verdict], logprobs: Logprobs) -> list[Verdict]:
        entries = logprobs.rows.to_host([max(0, count) for count in logprobs.num_top])
        base = 0
        shown = []
        for row, verdict in zip(self.plan.rows, verdicts, strict=True):
            if verdict.tokens and logprobs.num_top[base] >= 0:
                verdict = verdict._replace(logprobs=tuple(entries[base : base + len(verdict.tokens)]))
            shown.append(verdict)
            base += num_picks(row)
        return shown

    def _prompt(self, row: Row) -> tuple[TokenLogprobs | None, ...] | None:
        chunk = self.prompt_logprobs.get(row.request_id) if row.tokens else None
        return None if chunk is None else chunk.to_host()


def _verdict(row: Row, numbers: list[int], margin: float) -> Verdict:
    """numbers: a row of a packed outcome."""
    if not row.samples:
        return Verdict(row.request_id)
    if not row.emits:
        return Verdict(row.request_id, (), 0, None, margin)
    return Verdict(row.request_id, tuple(numbers[: numbers[-2] + 1]), row.num_drafted)


def num_picks(row: Row) -> int:
    """Logits rows of a plan's row: all tokens of a decoding row, the last of a prefill that reaches its end."""
    return 0 if not row.samples else 1 if row.tokens else row.num_tokens
