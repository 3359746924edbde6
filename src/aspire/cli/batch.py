"""Runs a batch of prompts on an engine and keeps what finished, whatever happens to the rest."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from aspire.cli.options import Group, read_json_fields, with_calibration
from aspire.progress import Progress, no_progress
from aspire.request import RequestOutput, SamplingParams
from aspire.stats import JsonLines, Observer

if TYPE_CHECKING:
    from aspire.engine import Engine
    from aspire.llm import LLM


@dataclass(slots=True)
class Batch:
    """Per prompt, in order: its finished output or its error; both None when the run was interrupted before."""

    outputs: list[RequestOutput | None]
    errors: list[str | None]
    interrupted: bool = False

    @property
    def finished(self) -> list[RequestOutput]:
        return [output for output in self.outputs if output is not None]


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    token_ids: tuple[int, ...]


def make_llm(model: str, options: Group, *, observers: Sequence[Observer] = ()) -> "LLM":
    """The model, loaded with a progress bar. Imports torch."""
    from aspire.llm import LLM

    return LLM(model, observers=observers, show_progress=True, **with_calibration(read_json_fields(options)))


@contextmanager
def recording(path: str | None) -> Iterator[list[Observer]]:
    """The observers of --stats-file, closed at the end. Raises ValueError when the file cannot be written."""
    if path is None:
        yield []
        return
    try:
        observer = JsonLines(path)
    except OSError as error:
        raise ValueError(f"stats_file must be a writable path, got {path!r} ({error})") from None
    try:
        yield [observer]
    finally:
        observer.close()


def plain_prompts(llm: "LLM", texts: Sequence[str]) -> list[Prompt]:
    """Texts as they stand, with the tokenizer's own special tokens."""
    tokenizer: Any = llm.get_tokenizer()
    return [Prompt(text, tuple(tokenizer(text)["input_ids"]) if text else ()) for text in texts]


def chat_prompts(llm: "LLM", texts: Sequence[str]) -> list[Prompt]:
    """Each text as the user's message in the model's chat template."""
    messages: list[list[Mapping[str, Any]]] = [[{"role": "user", "content": text}] for text in texts]
    return [Prompt(text, tuple(llm.render_chat(one))) for text, one in zip(texts, messages, strict=True)]


def run_batch(engine: "Engine", prompts: Sequence[Prompt], params: SamplingParams, *,
              progress: Progress = no_progress) -> Batch:
    """Run all prompts to their ends. A refused prompt leaves an error and does not disturb the others; Ctrl-C stops
    the unfinished ones and keeps the finished."""
    batch = Batch([None] * len(prompts), [None] * len(prompts))
    unfinished: dict[str, int] = {}
    try:
        for index, prompt in enumerate(prompts):
            try:
                engine.add(str(index), prompt.token_ids, params, prompt=prompt.text)
                unfinished[str(index)] = index
            except ValueError as error:
                batch.errors[index] = str(error)
        with progress("Generating", len(unfinished)) as advance:
            while unfinished:
                for group in engine.advance():
                    if group.is_finished:
                        batch.outputs[unfinished.pop(group.request_id)] = group.render()
                        advance(1)
    except KeyboardInterrupt:
        batch.interrupted = True
    finally:
        for request_id in unfinished:
            engine.abort(request_id)
    return batch


def stats_table(outputs: Sequence[RequestOutput], *, title: str) -> Table:
    """Counts per request and in total. prompt: its tokens; tokens: of all its outputs; rate: accepted / drafted."""
    table = Table(title=title, box=None, padding=(0, 2, 0, 0))  # fits 80 columns
    for name in ("request", "prompt", "tokens", "verifications", "drafted", "accepted", "rate",
                 "tokens per\nverification"):
        table.add_column(name, justify="left" if name == "request" else "right")
    rows = [_counts(output) for output in outputs]
    for output, row in zip(outputs, rows, strict=True):
        table.add_row(output.request_id, *_cells(row))
    table.add_row("total", *_cells([sum(column) for column in zip(*rows, strict=True)] or [0] * 5), style="bold")
    return table


def _counts(output: RequestOutput) -> list[int]:
    metrics = output.metrics
    assert metrics is not None, "a finished output has metrics"
    num_tokens = sum(len(one.token_ids) for one in output.outputs)
    return [len(output.prompt_token_ids), num_tokens, metrics.num_verifications, metrics.num_drafted,
            metrics.num_accepted]


def _cells(counts: Sequence[int]) -> list[str]:
    _, _, verifications, drafted, accepted = counts
    rate = f"{accepted / drafted:.3f}" if drafted else "-"
    per_verification = f"{(accepted + verifications) / verifications:.2f}" if verifications else "-"
    return [*(str(count) for count in counts), rate, per_verification]
