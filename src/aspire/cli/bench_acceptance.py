"""`aspire bench acceptance`: how often selections' drafts are accepted on real text; table, JSON and a plot."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aspire.cli.options import ENGINE_FLAGS, SAMPLING_FLAGS, Group, read_json_fields, with_flags
from aspire.request import SamplingParams

if TYPE_CHECKING:
    from aspire.bench.acceptance import Measured

DEFAULT_POLICIES = "streaming,pillar,aspire-paper,aspire"
WIDTH = 96


@with_flags(engine=ENGINE_FLAGS, sampling=SAMPLING_FLAGS)
def acceptance(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, GGUF file or smollm2-135m")],
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated; each runs in lock step")] = (
        DEFAULT_POLICIES),
    data: Annotated[list[str] | None, typer.Option(
        metavar="FILE", help="JSON lines with question and answer; may be repeated; default: shipped problems")] = None,
    num_prompts: Annotated[int, typer.Option(min=1)] = 4,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt")] = 2048,
    draft_length: Annotated[int, typer.Option(min=1, help="Drafts before each verification")] = 16,
    order: Annotated[int, typer.Option(help="Seed of the problems' order")] = 0,
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="Where the picture goes")] = None,
    *,
    engine: Group,
    sampling: Group,
) -> None:
    """Measure acceptance by position, tokens per verification, KV bytes per token and wasted drafts."""
    from aspire.bench.acceptance import make_contexts, measure, read_problems, shipped_problems
    from aspire.cli.batch import make_llm

    if "policy" in engine:
        raise ValueError(f"policy must be given by --policies here, got {engine['policy']!r}")
    chosen: Group = {"max_tokens": 128, "temperature": 0.0, "ignore_eos": True, **sampling}
    params = SamplingParams(**chosen)
    problems = [problem for file in data for problem in read_problems(file)] if data else shipped_problems()
    options: Any = _options(engine, length=context + (params.max_tokens or 0), draft_length=draft_length,
                            num_prompts=num_prompts)
    tokenizer = make_llm(model, {**engine, "policy": "autoregressive", "max_model_len": 64, "num_blocks": 8,
                                 "max_num_seqs": 1}).get_tokenizer()
    contexts = make_contexts(problems, tokenizer, count=num_prompts, length=context, seed=order)
    results = [measure(model, _lockstep(name), contexts, params, options) for name in policies.split(",")]
    show(results)
    if out is not None:
        _draw(results, Path(out))
    print(json.dumps({"bench": "acceptance", "model": model, "context": context, "prompts": num_prompts,
                      "draft_length": draft_length, "temperature": params.temperature,
                      "policies": [describe(result) for result in results]}))


def _options(engine: Group, *, length: int, draft_length: int, num_prompts: int) -> Group:
    """Engine options with the fixed draft length; flags that were given win."""
    from dataclasses import replace

    from aspire.speculation.policy import Overrides

    read = {"max_num_seqs": num_prompts, "max_model_len": length, **read_json_fields(engine)}
    return {**read, "overrides": replace(read.get("overrides", Overrides()), drafts=draft_length)}


def _lockstep(name: str) -> str:
    """The preset with this selection in which all requests draft the same length."""
    name = name.strip()
    return name if name.startswith("synchronized-") else f"synchronized-{name}"


def describe(result: "Measured") -> dict[str, Any]:
    """The JSON object of one policy."""
    pairs = zip(result.counts.accepted, result.counts.reached, strict=True)
    return {"policy": result.policy, "drafts": result.drafts, "rate": result.rate,
            "rate_by_position": [accepted / reached if reached else None for accepted, reached in pairs],
            "reached_by_position": list(result.counts.reached),
            "tokens_per_verification": result.tokens_per_verification, "kv_bytes_per_token": result.kv_bytes,
            "wasted": result.wasted, "tokens": result.tokens, "seconds": result.seconds}


def show(results: "list[Measured]") -> None:
    """The table, on stdout."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("policy", "drafts", "rate", "first", "last", "tokens per\nverification", "KV MB per\ntoken",
                 "wasted\ndrafts", "seconds"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for one in results:
        rates = [rate for rate in describe(one)["rate_by_position"] if rate is not None]
        table.add_row(one.policy, str(one.drafts), "-" if one.rate is None else f"{one.rate:.3f}",
                      f"{rates[0]:.3f}" if rates else "-", f"{rates[-1]:.3f}" if rates else "-",
                      "-" if one.tokens_per_verification is None else f"{one.tokens_per_verification:.2f}",
                      f"{one.kv_bytes / 1e6:.2f}", f"{one.wasted:.1%}", f"{one.seconds:.1f}")
    console = Console()
    Console(width=max(WIDTH, console.width)).print(table)


def _draw(results: "list[Measured]", folder: Path) -> None:
    try:
        from aspire.plots.acceptance import draw_acceptance
        from aspire.plots.style import save
    except ImportError as error:
        raise ValueError(f"pictures need matplotlib: pip install 'aspire-llm[plots]' ({error})") from None

    folder.mkdir(parents=True, exist_ok=True)
    for path in save(draw_acceptance({one.policy: one.steps for one in results}), folder / "acceptance-by-position"):
        print(path)
