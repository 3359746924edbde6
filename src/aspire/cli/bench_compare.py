"""`aspire bench compare`: the same real prompts under several policies, one table, and whether tokens are equal."""

import json
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aspire.cli.batch import Batch, Prompt, make_llm, plain_prompts, run_batch
from aspire.cli.generate import read_prompts
from aspire.cli.options import ENGINE_FLAGS, SAMPLING_FLAGS, Group, with_flags
from aspire.progress import terminal_progress
from aspire.request import SamplingParams
from aspire.samples import gsm8k_sample, worked_examples
from aspire.stats import StepStats

DEFAULT_POLICIES = ("autoregressive", "streaming", "pillar", "aspire-paper", "aspire")
TOKENS_PER_EXAMPLE = 180  # of the shipped problems, about
WIDTH = 104  # of the table, columns


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy's run. steps: forward passes; seconds: prefill included; equal: to the first policy's tokens."""

    policy: str
    tokens: int
    steps: int
    verifications: int
    drafted: int
    accepted: int
    wasted: int
    acceptance: float | None
    tokens_per_verification: float | None
    seconds: float
    tokens_per_second: float
    equal: bool


class Totals:
    """An observer that keeps sums of a run."""

    def __init__(self) -> None:
        self.steps = self.drafts = self.judged = 0

    def on_step(self, stats: StepStats) -> None:
        self.steps += 1
        self.drafts += sum(row.kind == "draft" for row in stats.rows)
        self.judged += stats.num_drafted

    def close(self) -> None:
        """Nothing is held."""


@with_flags(engine=ENGINE_FLAGS, sampling=SAMPLING_FLAGS)
def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, GGUF file or smollm2-135m")],
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated; the first one is the yardstick")] = (
        ",".join(DEFAULT_POLICIES)),
    prompt_file: Annotated[str | None, typer.Option(
        metavar="FILE", help='One prompt a line, or JSON lines with "prompt"; default: shipped problems')] = None,
    num_prompts: Annotated[int, typer.Option(min=1, max=24, help="Shipped prompts to take")] = 4,
    context: Annotated[int, typer.Option(min=1, help="About how many tokens of solved problems precede each")] = 1500,
    *,
    engine: Group,
    sampling: Group,
) -> None:
    """Run the same prompts under each policy."""
    if "policy" in engine:
        raise ValueError(f"policy must be given by --policies here, got {engine['policy']!r}")
    params = _params(sampling)
    texts = read_prompts(prompt_file) if prompt_file else shipped_prompts(num_prompts, context)
    results: list[Comparison] = []
    yardstick: list[Any] = []
    for name in policies.split(","):
        totals = Totals()
        llm = make_llm(model, {**engine, "policy": name.strip()}, observers=[totals])
        prompts = plain_prompts(llm, texts)
        begun = time.monotonic()
        batch = _run(llm.engine, prompts, params)
        seconds = time.monotonic() - begun
        tokens = [[one.token_ids for one in output.outputs] for output in batch.finished]
        yardstick = yardstick or tokens
        results.append(summarise(name.strip(), batch, totals, seconds=seconds, equal=tokens == yardstick))
    show(results)
    print(json.dumps({"bench": "compare", "model": model, "prompts": len(texts),
                      "policies": [asdict(result) for result in results]}))


def _params(sampling: Group) -> SamplingParams:
    chosen: Group = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True, **sampling}
    return SamplingParams(**chosen)


def shipped_prompts(count: int, context: int) -> list[str]:
    """Few-shot prompts over different problems, each about `context` tokens long."""
    problems = gsm8k_sample()
    examples = min(len(problems) - 1, max(1, round(context / TOKENS_PER_EXAMPLE)))
    rings = [problems[i:] + problems[:i] for i in range(0, 2 * count, 2)]
    return [worked_examples(ring[1:examples + 1], ring[0].question) for ring in rings]


def _run(engine: Any, prompts: list[Prompt], params: SamplingParams) -> Batch:
    """A run that must be whole. Raises ValueError for a refused prompt, KeyboardInterrupt for Ctrl-C."""
    batch = run_batch(engine, prompts, params, progress=terminal_progress)
    for index, error in enumerate(batch.errors):
        if error is not None:
            raise ValueError(f"prompt {index}: {error}")
    if batch.interrupted:
        raise KeyboardInterrupt
    return batch


def summarise(policy: str, batch: Batch, totals: Totals, *, seconds: float, equal: bool) -> Comparison:
    """The sums of a run. Drafts that reached no verdict are wasted."""
    metrics = [output.metrics for output in batch.finished if output.metrics is not None]
    tokens = sum(len(one.token_ids) for output in batch.finished for one in output.outputs)
    verifications = sum(one.num_verifications for one in metrics)
    drafted, accepted = sum(one.num_drafted for one in metrics), sum(one.num_accepted for one in metrics)
    return Comparison(
        policy=policy, tokens=tokens, steps=totals.steps, verifications=verifications, drafted=drafted,
        accepted=accepted, wasted=totals.drafts - totals.judged if drafted else 0,
        acceptance=accepted / drafted if drafted else None,
        tokens_per_verification=(accepted + verifications) / verifications if verifications else None,
        seconds=seconds, tokens_per_second=tokens / seconds, equal=equal)


def show(results: list[Comparison]) -> None:
    """The table, on stdout."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("policy", "steps", "drafted", "accepted", "rate", "tokens per\nverification", "seconds",
                 "equal to\nthe first"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for one in results:
        table.add_row(one.policy, str(one.steps), str(one.drafted), str(one.accepted),
                      "-" if one.acceptance is None else f"{one.acceptance:.3f}",
                      "-" if one.tokens_per_verification is None else f"{one.tokens_per_verification:.2f}",
                      f"{one.seconds:.1f}", "yes" if one.equal else "no")
    console = Console()
    Console(width=max(WIDTH, console.width)).print(table)
