"""POST /v1/completions: text or token ids in, text out, whole or streamed; echo and log probabilities included."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from aspire.request import CompletionOutput, RequestOutput, SamplingParams
from aspire.schedule.plan import TokenLogprobs
from aspire.server.errors import bad_request
from aspire.server.logprobs import completion_logprobs
from aspire.server.protocol import CompletionRequest, StreamOptions
from aspire.server.sampling import Extras, sampling_params
from aspire.server.service import Delta, Progress, Prompt, Service, usage
from aspire.server.sse import Chunks
from aspire.server.stream import stream_job
from aspire.server.watch import ClientWatch


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, checked. echo_only: max_tokens 0, nothing but the prompt is wanted."""

    body: CompletionRequest
    id: str
    model: str
    prompts: list[Prompt]
    params: list[SamplingParams]
    echo_only: bool


async def create_completion(service: Service, body: CompletionRequest, request: Request) -> ASGIApp:
    """The route. Raises ApiError, and what Service.start raises."""
    asked = await _check(service, body, request)
    starting = service.start(asked.id, asked.prompts, asked.params, priority=body.priority, timeout=body.timeout)
    if body.stream:
        return stream_job(service, starting, partial(Chunker, service, asked))
    with ClientWatch(request.receive):
        outputs = await service.finals(await starting)
    choices = [_choice(service, asked, i, output, part) for i, output in enumerate(outputs)
               for part in output.outputs]
    shown = [_without_output(output) for output in outputs] if asked.echo_only else outputs
    return JSONResponse({**_head(service, asked), "choices": choices, "usage": usage(shown)})


async def _check(service: Service, body: CompletionRequest, request: Request) -> Asked:
    model = service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed with stream", "stream_options")
    echo_only = body.max_tokens == 0
    if echo_only and not body.echo:
        raise bad_request("max_tokens must be at least 1 unless echo is set, got 0", "max_tokens")
    prompts = await _prompts(service, body)
    params = []
    for prompt in prompts:
        service.check_tokens(prompt.token_ids)
        room = service.room(prompt, 1 if echo_only else body.max_tokens)
        extras = Extras(room, body.logprobs, body.logprobs if body.echo else None)
        params.append(sampling_params(body, extras, service.config, service.vocab_size))
    return Asked(body, service.new_id("cmpl-", request, body.request_id), model, prompts, params, echo_only)


async def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    if not 1 <= len(given) <= service.config.max_prompts:
        raise bad_request(f"prompt must hold 1 to {service.config.max_prompts} prompts, got {len(given)}", "prompt")
    return [Prompt(await service.llm.encode(one, add_special_tokens=body.add_special_tokens), one)
            if isinstance(one, str) else Prompt(one) for one in given]


def _head(service: Service, asked: Asked) -> dict[str, object]:
    return {"id": asked.id, "object": "text_completion", "created": int(time.time()), "model": asked.model}


def _prompt_text(service: Service, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return str(service.llm.tokenizer.decode(prompt.token_ids, skip_special_tokens=False))


def _choice(service: Service, asked: Asked, prompt_index: int, output: RequestOutput,
            part: CompletionOutput) -> dict[str, object]:
    body, prompt = asked.body, asked.prompts[prompt_index]
    echoed = _prompt_text(service, prompt) if body.echo else ""
    text, tokens = part.text, list(part.token_ids)
    entries: list[TokenLogprobs | None] = list(part.logprobs or ())
    if asked.echo_only:
        text, tokens, entries = "", [], []
    logprobs = None
    if body.logprobs is not None:
        if body.echo:
            tokens = [*output.prompt_token_ids, *tokens]
            entries = [*(output.prompt_logprobs or ()), *entries]
        logprobs = completion_logprobs(tokens, entries, body.logprobs, service.token_text, 0)
    choice: dict[str, object] = {
        "index": prompt_index * body.n + part.index, "text": echoed + text, "logprobs": logprobs,
        "finish_reason": "length" if asked.echo_only else part.finish_reason,
        "stop_reason": None if asked.echo_only else part.stop_reason}
    if body.return_token_ids:
        choice.update(token_ids=[] if asked.echo_only else list(part.token_ids),
                      prompt_token_ids=list(output.prompt_token_ids))
    return choice


def _without_output(output: RequestOutput) -> RequestOutput:
    return RequestOutput(output.request_id, output.prompt, output.prompt_token_ids, (), True, output.metrics)


class Chunker:
    """Writes a streamed answer: see aspire.server.stream.Writer."""

    def __init__(self, service: Service, asked: Asked) -> None:
        self._service, self._asked = service, asked
        options = asked.body.stream_options or StreamOptions()
        self._usage_last, self._usage_always = options.include_usage, options.continuous_usage_stats
        self._usage_null: dict[str, object] = {"usage": None} if options.include_usage else {}
        self._chunks = Chunks(_head(service, asked))
        self._progress = [[Progress() for _ in range(asked.body.n)] for _ in asked.prompts]
        self._latest: list[RequestOutput | None] = [None for _ in asked.prompts]

    def begin(self) -> bytes:
        return b""

    def write(self, index: int, output: RequestOutput) -> bytes:
        self._latest[index] = output
        extra = {"usage": usage([output])} if self._usage_always else self._usage_null
        pieces = []
        for part in output.outputs:
            shown = self._progress[index][part.index]
            offset, first = shown.num_chars, not shown.begun
            delta = shown.advance(part)
            if delta is not None and _is_worth_showing(delta, self._asked.body):
                shown.begun = True
                choice = _delta_choice(self._service, self._asked, index, output, delta, offset, first)
                pieces.append(self._chunks.event([choice], extra))
        return b"".join(pieces)

    def end(self) -> bytes:
        if not self._usage_last:
            return b""
        final = [output for output in self._latest if output is not None]
        shown = [_without_output(output) for output in final] if self._asked.echo_only else final
        return self._chunks.event([], {"usage": usage(shown)})


def _is_worth_showing(delta: Delta, body: CompletionRequest) -> bool:
    return bool(delta.text or delta.finish_reason or body.logprobs is not None or body.return_token_ids)


def _delta_choice(service: Service, asked: Asked, prompt_index: int, output: RequestOutput, delta: Delta, offset: int,
                  first: bool) -> dict[str, object]:
    """One chunk's choice; the first one of an output carries the echo."""
    if asked.body.echo or asked.echo_only:
        echo = first and asked.body.echo
        part = CompletionOutput(delta.index, delta.text, delta.token_ids, logprobs=delta.logprobs,
                                finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        if echo:
            return _choice(service, asked, prompt_index, output, part)
        offset += len(_prompt_text(service, asked.prompts[prompt_index]))
        if asked.echo_only:
            delta = Delta(delta.index, "", (), None, 0, delta.finish_reason and "length", None)
    body = asked.body
    logprobs = None
    if body.logprobs is not None:
        logprobs = completion_logprobs(delta.token_ids, delta.logprobs or (), body.logprobs, service.token_text,
                                       offset)
    choice: dict[str, object] = {"index": prompt_index * body.n + delta.index, "text": delta.text,
                                 "logprobs": logprobs, "finish_reason": delta.finish_reason,
                                 "stop_reason": delta.stop_reason}
    if body.return_token_ids:
        choice["token_ids"] = list(delta.token_ids)
    return choice
