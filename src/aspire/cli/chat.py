"""`aspire chat`: a conversation in the terminal; the answer appears as it is made."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from aspire.cli.batch import make_llm
from aspire.cli.options import ENGINE_FLAGS, SAMPLING_FLAGS, Group, with_flags
from aspire.request import SamplingParams

if TYPE_CHECKING:
    from aspire.llm import LLM

HELP = "Commands: /reset forgets the conversation, /exit (or Ctrl-D) ends. Ctrl-C stops an answer."
Conversation = list[dict[str, str]]


@with_flags(engine=ENGINE_FLAGS, sampling=SAMPLING_FLAGS)
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, GGUF file or smollm2-135m")],
    system: Annotated[str | None, typer.Option(help="System message")] = None,
    *,
    engine: Group,
    sampling: Group,
) -> None:
    """Talk to a model. Sampling defaults are the model's own."""
    if sampling.get("n", 1) != 1:
        raise ValueError(f"n must be 1 in a chat, got {sampling['n']}")
    llm = make_llm(model, {"max_num_seqs": 1} | engine)
    params = _params(llm, sampling)
    opening: Conversation = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{llm.engine.facts.name}. {HELP}")
    for line in _lines(interactive):
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": _answer(llm, messages, params)})


def _params(llm: "LLM", sampling: Group) -> SamplingParams:
    """The model's defaults, without a token limit, changed by the flags."""
    defaults = llm.get_default_sampling_params()
    kept = {name: getattr(defaults, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    return SamplingParams(**{**kept, "max_tokens": None, **sampling})


def _lines(interactive: bool) -> Iterator[str]:
    """What the user types, until the end of input; blank lines do not count."""
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _answer(llm: "LLM", messages: Conversation, params: SamplingParams) -> str:
    """Print the answer as it grows; Ctrl-C keeps what there is."""
    engine, request_id, text = llm.engine, "chat", ""
    engine.add(request_id, llm.render_chat(messages), params)
    try:
        while engine.has_unfinished:
            for output in engine.step():
                new = output.outputs[0].text
                print(new[len(text):], end="", flush=True)
                text = new
    except KeyboardInterrupt:
        engine.abort(request_id)
    print()
    return text
