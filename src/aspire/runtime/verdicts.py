"""PendingStep: a launched step whose results are on their way to the host, and how they become verdicts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aspire.runtime.judges import Outcome
from aspire.runtime.staging import Staging
from aspire.sampling.logprobs import LogprobRows
from aspire.schedule.plan import Row, StepPlan, TokenLogprobs, Verdict

_new = tuple.__new__  # makes named tuples in half the time of a call of theirs, which goes through Python


@dataclass(frozen=True, slots=True)
class HostOutcome:
    """A packed outcome on its way to host memory."""

    packed: Tensor  # int32 [R, K + 3] on the host: see ops.judge
    done: torch.cuda.Event | None

    def wait(self, num_rows: int) -> tuple[NDArray[np.int32], list[int], list[float]]:
        """Of the first rows: picks [R, K + 1], the number accepted, the margin."""
        if self.done is not None:
            self.done.synchronize()
        packed = self.packed[:num_rows].numpy()
        return packed[:, :-2], packed[:, -2].tolist(), packed[:, -1].view(np.float32).tolist()


def to_host(outcome: Outcome, staging: Staging) -> HostOutcome:
    """Start the copy; on the CPU there is nothing to wait for. The host's memory is used again by the third step after
    this one, when this one's verdicts have long been read."""
    packed = outcome.packed
    if packed.device.type != "cuda":
        return HostOutcome(packed, None)
    host = staging.claim(packed.numel(), torch.int32).view(packed.shape)
    host.copy_(packed, non_blocking=True)
    return HostOutcome(host, staging.mark())


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
    """A launched step; `verdicts` waits for it. on_verdicts: sees the plan, its verdicts and each row's first
    pick before anyone else (grammars follow the tokens)."""

    plan: StepPlan
    outcome: HostOutcome | None
    logprobs: Logprobs | None = None
    prompt_logprobs: Mapping[str, PromptLogprobs] = field(default_factory=dict)
    on_verdicts: Callable[[StepPlan, list[Verdict], list[int]], None] | None = None

    def verdicts(self) -> list[Verdict]:
        """One verdict per row of the plan, in order. RuntimeError when the model's logits are not numbers."""
        if self.outcome is None:
            return []
        rows = self.plan.rows
        picks, accepted, margins = self.outcome.wait(len(rows))
        if any(map(math.isnan, margins)):
            self._refuse_nan(margins)
        verdicts = _verdicts(rows, picks, accepted, margins)
        if self.logprobs is not None:
            verdicts = self._with_logprobs(verdicts, self.logprobs)
        if self.prompt_logprobs:
            verdicts = [verdict._replace(prompt_logprobs=self._prompt(row))
                        for row, verdict in zip(rows, verdicts, strict=True)]
        if self.on_verdicts is not None:
            self.on_verdicts(self.plan, verdicts, picks[:, 0].tolist())
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


def _verdicts(rows: Sequence[Row], picks: NDArray[np.int32], accepted: list[int],
              margins: list[float]) -> list[Verdict]:
    """picks: [R, K + 1]; accepted, margins: [R]."""
    verdicts = []
    for index, (name, _, _, _, _, num_drafted, samples, _, emits) in enumerate(rows):
        if not samples:
            verdicts.append(Verdict(name))
        elif emits:
            tokens = tuple(picks[index, : accepted[index] + 1].tolist())
            verdicts.append(_new(Verdict, (name, tokens, num_drafted, None, None, None)))
        else:
            verdicts.append(_new(Verdict, (name, (), 0, None, margins[index], None)))
    return verdicts


def num_picks(row: Row) -> int:
    """Logits rows of a plan's row: all tokens of a decoding row, the last of a prefill that reaches its end."""
    return 0 if not row.samples else 1 if row.tokens else row.num_tokens
