"""`aspire demo`: one batch decoded twice, with ASPIRE and plainly, and every token compared."""

import time
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from aspire.cli.batch import make_llm, recording, stats_table
from aspire.request import RequestOutput, SamplingParams
from aspire.samples import gsm8k_sample, worked_examples

MAX_MODEL_LEN = 4096
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """`text` is the user's message; `shown` its end, which is enough to follow the demo."""

    title: str
    text: str
    shown: str
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class DemoRun:
    outputs: list[RequestOutput]
    seconds: float


def demo_prompts(max_tokens: int) -> list[DemoPrompt]:
    """Six requests that differ: short and long, chat and few-shot, greedy and sampled."""
    problems = gsm8k_sample()
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    sampled = SamplingParams(max_tokens=max_tokens, **SAMPLED)  # type: ignore[arg-type]
    sky = "Write two sentences about why the sky is blue."
    few = worked_examples(problems[4:12], problems[1].question)
    many = worked_examples(problems[12:26], problems[2].question)
    return [
        DemoPrompt("short, greedy", problems[0].question, problems[0].question, greedy),
        DemoPrompt("short, sampled", problems[3].question, problems[3].question, sampled),
        DemoPrompt("short, greedy", sky, sky, greedy),
        DemoPrompt("short, sampled", sky, sky, sampled),
        DemoPrompt("8 worked examples, greedy", few, problems[1].question, greedy),
        DemoPrompt("14 worked examples, sampled", many, problems[2].question, sampled),
    ]


def demo(
    model: Annotated[str, typer.Option(metavar="MODEL", help="An instruct model")] = "smollm2-135m",
    policy: Annotated[str, typer.Option(metavar="NAME", help="What to compare with plain decoding")] = "aspire",
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens per request")] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, max=6, metavar="N", help="Requests; the last two are long")] = 6,
    stats_file: Annotated[str | None, typer.Option(metavar="FILE", help="Record the steps, for `aspire trace`")] = None,
) -> None:
    """Decode a batch with ASPIRE and plainly; show texts, drafts and whether all tokens are equal."""
    console = Console()
    prompts = demo_prompts(max_tokens)[:num_prompts]
    console.print(f"Decoding {len(prompts)} prompts with {model}, float32, policy {policy} ...")
    speculative = decode(model, policy, prompts, stats_file)
    console.print("The same prompts again, policy autoregressive ...")
    plain = decode(model, "autoregressive", prompts, None)
    for prompt, output in zip(prompts, speculative.outputs, strict=True):
        show(console, prompt, output)
    console.print(stats_table(speculative.outputs, title=f"policy {policy}"))
    console.print(f"{policy} {speculative.seconds:.0f} s, autoregressive {plain.seconds:.0f} s, prompts included. "
                  "On a CPU, with so small a model, attention is a minor cost and speculation need not be faster.")
    if not compare(console, speculative.outputs, plain.outputs):
        raise typer.Exit(1)


def decode(model: str, policy: str, prompts: list[DemoPrompt], stats_file: str | None) -> DemoRun:
    """Run the batch on a fresh engine."""
    options = {"policy": policy, "dtype": "float32", "max_num_seqs": len(prompts), "max_model_len": MAX_MODEL_LEN}
    with recording(stats_file) as observers:
        llm = make_llm(model, options, observers=observers)
        inputs = [llm.render_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]
        begun = time.monotonic()
        outputs = llm.generate(inputs, [prompt.params for prompt in prompts])
    return DemoRun(outputs, time.monotonic() - begun)


def show(console: Console, prompt: DemoPrompt, output: RequestOutput) -> None:
    """The end of the prompt and what the model wrote."""
    console.print(f"\n[bold]request {output.request_id}[/bold] ({prompt.title}, {len(output.prompt_token_ids)} tokens)")
    console.print(Text(prompt.shown, style="dim"))
    console.print(Text(output.outputs[0].text.strip()))


def compare(console: Console, left: list[RequestOutput], right: list[RequestOutput]) -> bool:
    """Say whether all tokens are equal, and where not."""
    different = [(one.request_id, one.outputs[0].token_ids, other.outputs[0].token_ids)
                 for one, other in zip(left, right, strict=True)
                 if one.outputs[0].token_ids != other.outputs[0].token_ids]
    if not different:
        total = sum(len(one.outputs[0].token_ids) for one in left)
        console.print(f"[bold green]All {total} tokens equal autoregressive decoding.[/bold green]")
        return True
    for request_id, ours, theirs in different:
        pairs = zip(ours, theirs, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        console.print(f"[bold red]Request {request_id} differs from autoregressive decoding at token {place}.[/]")
    return False
