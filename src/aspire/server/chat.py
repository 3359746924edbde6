"""POST /v1/chat/completions: conversations, tools, reasoning and constrained output, whole or streamed."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from aspire.request import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputs
from aspire.server.call_scanner import CallArguments, CallStart, Content, Event
from aspire.server.chat_prompt import chat_prompt
from aspire.server.config import ServerConfig
from aspire.server.errors import bad_request
from aspire.server.logprobs import chat_logprobs
from aspire.server.protocol import ChatCompletionRequest, NamedToolChoice, StreamOptions
from aspire.server.reasoning import ThinkSplitter
from aspire.server.sampling import Extras, json_constraint, sampling_params
from aspire.server.service import Delta, Progress, Prompt, Service, usage
from aspire.server.sse import Chunks
from aspire.server.stream import stream_job
from aspire.server.tools import JsonCallsParser, NamedCallParser, ToolParser, make_parser
from aspire.server.watch import ClientWatch


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, checked."""

    body: ChatCompletionRequest
    id: str
    model: str
    prompt: Prompt
    params: SamplingParams


class Speaker:
    """One output on its way to the client: splits its text into reasoning, content and tool calls."""

    def __init__(self, service: Service, asked: Asked) -> None:
        thinks = service.splits_reasoning and not _is_constrained(asked.body)
        self._thoughts = ThinkSplitter(asked.prompt.text or "") if thinks else None
        self._tools = _tool_parser(service, asked.body)
        self._one_call = asked.body.parallel_tool_calls is False
        self.called = False

    def hear(self, text: str, last: bool) -> tuple[str, list[Event]]:
        """(reasoning, events) of a new piece of text."""
        reasoning, content = self._thoughts.feed(text) if self._thoughts else ("", text)
        if last and self._thoughts:
            more = self._thoughts.finish()
            reasoning, content = reasoning + more[0], content + more[1]
        if self._tools is None:
            return reasoning, [Content(content)] if content else []
        events = self._tools.feed(content)
        if last:
            events += self._tools.finish()
        if self._one_call:
            events = [item for item in events if isinstance(item, Content) or item.index == 0]
        self.called = self.called or any(isinstance(item, CallStart) for item in events)
        return reasoning, events


async def create_chat_completion(service: Service, body: ChatCompletionRequest, request: Request) -> ASGIApp:
    """The route. Raises ApiError, and what Service.start raises."""
    asked = await _check(service, body, request)
    starting = service.start(asked.id, [asked.prompt], [asked.params], priority=body.priority, timeout=body.timeout)
    if body.stream:
        return stream_job(service, starting, partial(Chunker, service, asked))
    with ClientWatch(request.receive):
        [output] = await service.finals(await starting)
    choices = [_choice(service, asked, part) for part in output.outputs]
    return JSONResponse({**_head(service, asked, "chat.completion"), "choices": choices, "usage": usage([output])})


async def _check(service: Service, body: ChatCompletionRequest, request: Request) -> Asked:
    model = service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed with stream", "stream_options")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    _check_tool_choice(service, body)
    offered = None if body.tool_choice == "none" else body.tools
    text = chat_prompt(service, body, body.messages, offered)
    prompt = Prompt(await service.llm.encode(text, add_special_tokens=body.add_special_tokens), text)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted == 0:
        raise bad_request("max_tokens must be at least 1, got 0", "max_tokens")
    extras = Extras(service.room(prompt, wanted), (body.top_logprobs or 0) if body.logprobs else None, None,
                    _tool_constraint(body, service.config))
    params = sampling_params(body, extras, service.config, service.vocab_size)
    return Asked(body, service.new_id("chatcmpl-", request, body.request_id), model, prompt, params)


def _check_tool_choice(service: Service, body: ChatCompletionRequest) -> None:
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return
    names = [tool.function.name for tool in body.tools]
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise bad_request(f"tool_choice must name one of {', '.join(names)}, got {choice.function.name!r}",
                          "tool_choice")
    if choice in (None, "auto") and service.tool_format == "none":
        raise bad_request("tools need tool_choice \"required\" or a named function: the model's chat template shows no "
                          "tool format that this server knows (see --tool-call-parser)", "tools")


def _is_constrained(body: ChatCompletionRequest) -> bool:
    return bool(body.tools) and (body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice))


def _tool_constraint(body: ChatCompletionRequest, config: ServerConfig) -> StructuredOutputs | None:
    """Forced calls are forced by grammar: arguments alone for a named function, else a list of calls."""
    if not body.tools or not _is_constrained(body):
        return None
    if isinstance(body.tool_choice, NamedToolChoice):
        name = body.tool_choice.function.name
        [function] = [tool.function for tool in body.tools if tool.function.name == name][:1]
        return json_constraint(function.parameters or {"type": "object"}, "tools", config)
    calls = [{"type": "object", "additionalProperties": False, "required": ["name", "parameters"],
              "properties": {"name": {"type": "string", "enum": [tool.function.name]},
                             "parameters": tool.function.parameters or {"type": "object"}}} for tool in body.tools]
    limit = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    return json_constraint({"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}, "tools", config)


def _tool_parser(service: Service, body: ChatCompletionRequest) -> ToolParser | None:
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, NamedToolChoice):
        return NamedCallParser(body.tool_choice.function.name)
    names = tuple(tool.function.name for tool in body.tools)
    return JsonCallsParser(names) if body.tool_choice == "required" else make_parser(service.tool_format, names)


def _finish_reason(reason: str | None, speaker: Speaker, body: ChatCompletionRequest) -> str | None:
    calls = speaker.called and not isinstance(body.tool_choice, NamedToolChoice)
    return "tool_calls" if reason == "stop" and calls else reason


def _head(service: Service, asked: Asked, kind: str) -> dict[str, object]:
    return {"id": asked.id, "object": kind, "created": int(time.time()), "model": asked.model}


def _choice(service: Service, asked: Asked, part: CompletionOutput) -> dict[str, object]:
    speaker = Speaker(service, asked)
    reasoning, events = speaker.hear(part.text, True)
    message: dict[str, Any] = {"role": "assistant", "refusal": None,
                               "content": "".join(item.text for item in events if isinstance(item, Content)) or None}
    calls: list[dict[str, Any]] = []
    for item in events:
        if isinstance(item, CallStart):
            calls.append({"id": item.id, "type": "function", "function": {"name": item.name, "arguments": ""}})
        elif isinstance(item, CallArguments):
            calls[item.index]["function"]["arguments"] += item.text
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    if reasoning:
        message["reasoning_content"] = reasoning
    choice: dict[str, object] = {
        "index": part.index, "message": message,
        "finish_reason": _finish_reason(part.finish_reason, speaker, asked.body), "stop_reason": part.stop_reason,
        "logprobs": chat_logprobs(part.logprobs or (), asked.body.top_logprobs or 0, service.token_text)
        if asked.body.logprobs else None}
    if asked.body.return_token_ids:
        choice.update(token_ids=list(part.token_ids), prompt_token_ids=list(asked.prompt.token_ids))
    return choice


class Chunker:
    """Writes a streamed answer: see aspire.server.stream.Writer."""

    def __init__(self, service: Service, asked: Asked) -> None:
        self._service, self._body = service, asked.body
        options = asked.body.stream_options or StreamOptions()
        self._usage_last, self._usage_always = options.include_usage, options.continuous_usage_stats
        self._usage_null: dict[str, object] = {"usage": None} if options.include_usage else {}
        self._chunks = Chunks(_head(service, asked, "chat.completion.chunk"))
        self._shown = [Progress() for _ in range(asked.body.n)]
        self._speakers = [Speaker(service, asked) for _ in range(asked.body.n)]
        self._latest: RequestOutput | None = None

    def begin(self) -> bytes:
        return b"".join(self._chunks.event([{
            "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
            "finish_reason": None}], self._usage_null) for index in range(self._body.n))

    def write(self, index: int, output: RequestOutput) -> bytes:
        self._latest = output
        extra = {"usage": usage([output])} if self._usage_always else self._usage_null
        pieces = []
        for part in output.outputs:
            delta = self._shown[part.index].advance(part)
            if delta is not None:
                choices = _delta_choices(self._service, self._body, self._speakers[part.index], delta)
                pieces += [self._chunks.event([choice], extra) for choice in choices]
        return b"".join(pieces)

    def end(self) -> bytes:
        if not self._usage_last or self._latest is None:
            return b""
        return self._chunks.event([], {"usage": usage([self._latest])})


def _delta_choices(service: Service, body: ChatCompletionRequest, speaker: Speaker,
                   delta: Delta) -> list[dict[str, object]]:
    """The chunks of one step: usually one; log probabilities and token ids ride on the first."""
    reasoning, events = speaker.hear(delta.text, delta.finish_reason is not None)
    pieces: list[dict[str, object]] = [{"reasoning_content": reasoning}] if reasoning else []
    pieces += [_delta_of(item) for item in events]
    if not pieces and (delta.finish_reason or body.logprobs or body.return_token_ids):
        pieces = [{}]
    choices: list[dict[str, object]] = [
        {"index": delta.index, "delta": piece, "logprobs": None, "finish_reason": None} for piece in pieces]
    if choices:
        if body.logprobs:
            choices[0]["logprobs"] = chat_logprobs(delta.logprobs or (), body.top_logprobs or 0, service.token_text)
        if body.return_token_ids:
            choices[0]["token_ids"] = list(delta.token_ids)
        choices[-1]["finish_reason"] = _finish_reason(delta.finish_reason, speaker, body)
        choices[-1]["stop_reason"] = delta.stop_reason
    return choices


def _delta_of(item: Event) -> dict[str, object]:
    if isinstance(item, Content):
        return {"content": item.text}
    if isinstance(item, CallStart):
        return {"tool_calls": [{"index": item.index, "id": item.id, "type": "function",
                                "function": {"name": item.name, "arguments": ""}}]}
    return {"tool_calls": [{"index": item.index, "function": {"arguments": item.text}}]}
