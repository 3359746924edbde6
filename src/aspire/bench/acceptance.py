"""Acceptance of selections on real text: the same contexts under every policy, drafts of one fixed length.

Run in lock step, so that every policy drafts the same lengths and only its selection differs.
"""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aspire.config import EngineOptions
from aspire.llm import LLM
from aspire.positions import PositionCounts, count_positions
from aspire.request import SamplingParams
from aspire.samples import Problem, gsm8k_sample, worked_examples
from aspire.speculation.cost import KvShape
from aspire.stats import StepStats

FIELDS = (("question", "problem", "prompt"), ("answer", "solution", "response"))


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy's run. rate: chance that a draft is accepted given all before it were. kv_bytes: read per committed
    token, drafting and verifying, prefill left out. wasted: drafts after a rejection, as a share of all."""

    policy: str
    drafts: int
    rate: float | None
    counts: PositionCounts
    tokens_per_verification: float | None
    kv_bytes: float
    wasted: float
    tokens: int
    seconds: float
    steps: tuple[StepStats, ...]


class Recorder:
    """An observer that keeps all steps."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def close(self) -> None:
        """Nothing is held."""


def read_problems(path: str) -> list[Problem]:
    """Problems of a JSON-lines file with fields question or problem, and answer or solution.

    Raises ValueError naming file and line.
    """
    problems = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data must be readable JSON lines, got {path!r} ({error})") from None
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            texts = [next(str(entry[name]) for name in names if name in entry) for names in FIELDS]
        except (json.JSONDecodeError, StopIteration, TypeError, KeyError):
            raise ValueError(f"data must be JSON lines with a question and an answer, got {path!r} line {number}: "
                             f"{line[:60]!r}") from None
        problems.append(Problem(*texts))
    return problems


def make_contexts(problems: Sequence[Problem], tokenizer: Any, *, count: int, length: int,
                  seed: int) -> list[list[int]]:
    """`count` few-shot prompts of exactly `length` tokens: solved problems in random order, cut at the front, then a
    question. Raises ValueError when the problems are too few for one prompt."""
    chance = random.Random(seed)
    contexts = []
    for _ in range(count):
        order = list(problems)
        chance.shuffle(order)
        tokens: list[int] = tokenizer(worked_examples(order[1:], order[0].question))["input_ids"]
        if len(tokens) < length:
            raise ValueError(f"context must be at most {len(tokens)} tokens, all that the data holds, got {length}")
        contexts.append(tokens[-length:])
    return contexts


def measure(model: str, policy: str, contexts: Sequence[list[int]], params: SamplingParams,
            options: EngineOptions) -> Measured:
    """Run one policy over all contexts."""
    recorder = Recorder()
    chosen: EngineOptions = {**options, "policy": policy}
    llm = LLM(model, observers=[recorder], show_progress=True, **chosen)
    begun = time.monotonic()
    outputs = llm.generate(contexts, params)
    seconds = time.monotonic() - begun
    steps = tuple(recorder.steps)
    counts = count_positions(steps)
    lengths = {output.request_id: len(output.prompt_token_ids) for output in outputs}
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    verifications = sum(row.kind == "verify" for stats in steps for row in stats.rows)
    drafted, accepted = sum(counts.drafted), sum(counts.accepted)
    return Measured(
        policy=policy, drafts=drafted, rate=counts.rate, counts=counts,
        tokens_per_verification=(accepted + verifications) / verifications if verifications else None,
        kv_bytes=kv_bytes(steps, lengths, llm.engine.scheduler.cost.kv) / max(1, tokens - len(outputs)),
        wasted=(drafted - sum(counts.reached)) / drafted if drafted else 0.0, tokens=tokens, seconds=seconds,
        steps=steps)


def kv_bytes(steps: Sequence[StepStats], prompt_lengths: dict[str, int], shape: KvShape) -> float:
    """KV bytes that drafting and verifying rows read in all; `prompt_lengths` by request."""
    known = dict(prompt_lengths)
    total = 0.0
    for stats in steps:
        for row in stats.rows:
            if row.kind == "draft":
                total += shape.sparse_bytes(known[row.request_id], row.num_drafted)
            elif row.kind == "verify":
                total += shape.full_bytes(known[row.request_id] + row.num_drafted)
            known[row.request_id] += row.num_emitted
    return total


def shipped_problems() -> list[Problem]:
    """The sample that comes with the package; about 8,000 tokens in all."""
    return gsm8k_sample()
