"""`aspire generate`: completes prompts and prints text or one JSON object per prompt."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from aspire.cli.batch import Batch, chat_prompts, make_llm, plain_prompts, recording, run_batch, stats_table
from aspire.cli.main import INTERRUPTED, USAGE_ERROR
from aspire.cli.options import ENGINE_FLAGS, SAMPLING_FLAGS, Group, with_flags
from aspire.progress import terminal_progress
from aspire.request import CompletionOutput, RequestOutput, SamplingParams

DEFAULT_MAX_TOKENS = 256


@with_flags(engine=ENGINE_FLAGS, sampling=SAMPLING_FLAGS)
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, GGUF file or smollm2-135m")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be repeated")] = None,
    prompt_file: Annotated[str | None, typer.Option(
        metavar="FILE", help='One prompt a line, or JSON lines with "prompt"; - reads standard input')] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print a table of drafts and verifications")] = False,
    stats_file: Annotated[str | None, typer.Option(
        metavar="FILE", help="Record every step, for `aspire trace`")] = None,
    *,
    engine: Group,
    sampling: Group,
) -> None:
    """Complete prompts and print the texts, in the prompts' order."""
    chosen: Group = {"max_tokens": DEFAULT_MAX_TOKENS, "temperature": 0.0, **sampling}
    params = SamplingParams(**chosen)
    texts = [*(prompt or []), *(read_prompts(prompt_file) if prompt_file else [])]
    if not texts:
        raise ValueError("prompt must be given, by --prompt or --prompt-file, got none")
    with recording(stats_file) as observers:
        llm = make_llm(model, engine, observers=observers)
        prompts = chat_prompts(llm, texts) if chat else plain_prompts(llm, texts)
        batch = run_batch(llm.engine, prompts, params, progress=terminal_progress)
    policy = llm.engine.config.speculation.policy
    if json_lines:
        show_json(batch, policy)
    else:
        show_text(batch)
    if stats and batch.finished:
        Console(stderr=True).print(stats_table(batch.finished, title=f"policy {policy}"))
    _finish(batch)


def _finish(batch: Batch) -> None:
    for index, error in enumerate(batch.errors):
        if error is not None:
            print(f"aspire: error: prompt {index}: {' '.join(error.split())}", file=sys.stderr)
    if batch.interrupted:
        unfinished = sum(o is None and e is None for o, e in zip(batch.outputs, batch.errors, strict=True))
        print(f"aspire: interrupted, {unfinished} prompts unfinished", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if any(error is not None for error in batch.errors):
        raise typer.Exit(USAGE_ERROR)


def read_prompts(path: str) -> list[str]:
    """The prompts of a file: JSON lines if its first line is a JSON object, else one prompt per line. Blank lines do
    not count. Raises ValueError naming file and line."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt_file must be a readable UTF-8 text file, got {path!r} ({error})") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"prompt_file must hold at least one prompt, got {path!r} with none")
    if not lines[0][1].lstrip().startswith("{"):
        return [line for _, line in lines]
    return [_json_prompt(path, number, line) for number, line in lines]


def _json_prompt(path: str, number: int, line: str) -> str:
    try:
        value = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError):
        value = None
    if not isinstance(value, str):
        raise ValueError(f'prompt_file line must be a JSON object with a text "prompt", got {path!r} line {number}: '
                         f"{line.strip()[:60]!r}")
    return value


def show_text(batch: Batch) -> None:
    """The texts on stdout, under headings where there are several."""
    for index, output in enumerate(batch.outputs):
        if output is None:
            continue
        for one in output.outputs:
            if len(batch.outputs) > 1 or len(output.outputs) > 1:
                print(f"=== prompt {index}" + (f", output {one.index}" if len(output.outputs) > 1 else ""))
            print(one.text)


def show_json(batch: Batch, policy: str) -> None:
    """One JSON object a line, on stdout, per finished prompt."""
    for output in batch.finished:
        print(json.dumps(describe(output, policy), ensure_ascii=False), flush=True)


def describe(output: RequestOutput, policy: str) -> dict[str, Any]:
    """The object of --json. With n > 1 the top level shows the first output, "outputs" all of them."""
    metrics = output.metrics
    assert metrics is not None, "a finished output has metrics"
    entry = {
        "prompt": output.prompt,
        **_completion(output.outputs[0]),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": sum(len(one.token_ids) for one in output.outputs),
        "policy": policy,
        "num_verifications": metrics.num_verifications,
        "num_drafted": metrics.num_drafted,
        "num_accepted": metrics.num_accepted,
        "acceptance_rate": metrics.acceptance_rate,
        "tokens_per_verification": metrics.tokens_per_verification,
    }
    if len(output.outputs) > 1:
        entry["outputs"] = [_completion(one) for one in output.outputs]
    return entry


def _completion(one: CompletionOutput) -> dict[str, Any]:
    entry: dict[str, Any] = {"text": one.text, "token_ids": list(one.token_ids), "finish_reason": one.finish_reason}
    if one.logprobs is not None:
        entry["logprobs"] = [{"token_id": item.token_id, "logprob": item.logprob,
                              "top": [list(pair) for pair in item.top]} for item in one.logprobs]
    return entry
