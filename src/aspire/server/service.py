"""Service: what all routes share. Checks a request, hands its prompts to the engine, and tells its outputs apart."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from aspire.async_engine import AsyncLLM, OutputStream
from aspire.request import CompletionOutput, RequestOutput, SamplingParams
from aspire.schedule.plan import TokenLogprobs
from aspire.server.config import ServerConfig
from aspire.server.errors import ApiError, bad_request
from aspire.server.reasoning import template_thinks
from aspire.server.token_text import TokenText
from aspire.server.tools import template_tool_format


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the engine takes it. text: None when the client gave token ids."""

    token_ids: Sequence[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What an output gained since it was last looked at."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    num_accepted: int  # of its tokens, how many were drafts
    finish_reason: str | None
    stop_reason: int | str | None


class Progress:
    """Remembers how much of one output was shown. begun: a first chunk was sent."""

    __slots__ = ("begun", "num_accepted", "num_chars", "num_tokens", "over")

    def __init__(self) -> None:
        self.begun = False
        self.num_chars = 0
        self.num_tokens = 0
        self.num_accepted = 0
        self.over = False

    def advance(self, part: CompletionOutput) -> Delta | None:
        """The new piece; None when there is nothing new."""
        if self.over or (len(part.token_ids) == self.num_tokens and len(part.text) == self.num_chars
                         and part.finish_reason is None):
            return None
        accepted = part.metrics.num_accepted if part.metrics else 0
        delta = Delta(part.index, part.text[self.num_chars:], part.token_ids[self.num_tokens:],
                      part.logprobs[self.num_tokens:] if part.logprobs is not None else None,
                      accepted - self.num_accepted, part.finish_reason, part.stop_reason)
        self.num_chars, self.num_tokens, self.num_accepted = len(part.text), len(part.token_ids), accepted
        self.over = part.finish_reason is not None
        return delta


@dataclass(slots=True)
class Job:
    """A client's request: one stream per prompt under one public id."""

    id: str
    aborted: bool = False
    streams: list[OutputStream] = field(default_factory=list)


class Service:
    """Owned by the event loop of the server."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        self.created = int(time.time())
        self.model_names = config.served_model_names or (llm.model_name,)
        self.vocab_size = len(llm.tokenizer) if llm.tokenizer is not None else 2**31
        self.token_text = TokenText(llm.tokenizer)
        template = str(config.chat_template or getattr(llm.tokenizer, "chat_template", None) or "")
        self.tool_format = template_tool_format(template) if config.tool_format == "auto" else config.tool_format
        self.splits_reasoning = (template_thinks(template) if config.reasoning_format == "auto"
                                 else config.reasoning_format == "think")
        self._jobs: dict[str, Job] = {}

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def check_model(self, name: str | None) -> str:
        """The model's name to show. Raises ApiError 404 for a name that is not served."""
        if name is None or name == "":
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(404, f"model must be one of {', '.join(self.model_names)}, got {name!r}", param="model",
                           code="model_not_found")
        return name

    def new_id(self, prefix: str, request: Request, asked: str | None) -> str:
        """The id a response carries and that /abort takes: the body's request_id, else the X-Request-Id of the log."""
        given: str = asked or request.scope["aspire.request_id"]
        return given if given.startswith(prefix) else prefix + given

    def room(self, prompt: Prompt, max_tokens: int | None) -> int:
        """Output tokens for a prompt. Raises ApiError when it does not fit the model."""
        limit, length = self.llm.max_model_len, len(prompt.token_ids)
        if length == 0:
            raise bad_request("prompt must not be empty", "prompt")
        if length >= limit or (max_tokens is not None and length + max_tokens > limit):
            wanted = "" if max_tokens is None else f" and {max_tokens} for the completion"
            raise bad_request(f"This model's maximum context length is {limit} tokens, but the request has {length} "
                              f"in the prompt{wanted}", "prompt" if length >= limit else "max_tokens",
                              "context_length_exceeded")
        if max_tokens is not None:
            return max_tokens
        return min(limit - length, self.config.max_output_tokens or limit)

    def check_tokens(self, token_ids: Sequence[int], name: str = "prompt") -> None:
        worst = max(token_ids, default=0)
        if worst >= self.vocab_size:
            raise bad_request(f"{name} must hold token ids below {self.vocab_size}, got {worst}", name)

    async def start(self, job_id: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, priority: int,
                    timeout: float | None) -> Job:
        """Hand all prompts over; all are accepted or none. Raises ApiError and what AsyncLLM.submit raises."""
        if job_id in self._jobs:
            raise ApiError(409, f"request_id must be unique among running requests, got {job_id!r}",
                           param="request_id", code="duplicate_request_id")
        self._check_live(params)
        limits = [limit for limit in (timeout, self.config.request_timeout) if limit is not None]
        job = self._jobs[job_id] = Job(job_id)
        handing_over = [self.llm.submit(
            prompt.token_ids, one, request_id=job_id if len(prompts) == 1 else f"{job_id}-{i}", priority=priority,
            text=prompt.text, timeout=min(limits, default=None))
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))]
        try:
            job.streams += [await handing_over[0]] if len(prompts) == 1 else await _all_or_none(handing_over)
        except BaseException:
            self.finish(job)
            raise
        if job.aborted:
            self.abort(job.id)
        return job

    def _check_live(self, params: Sequence[SamplingParams]) -> None:
        """What could never be accepted is a mistake of the client; a full queue is not."""
        limit, wanted = self.llm.config.max_live, sum(one.n for one in params)
        if wanted > limit:
            name = "n" if len(params) == 1 else "prompt"
            raise bad_request(f"{name} must ask for at most {limit} outputs, prompts times n (see --max-live), got "
                              f"{wanted}", name)

    def finish(self, job: Job) -> None:
        """Forget a job; what still runs is aborted."""
        for stream in job.streams:
            stream.close()
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]

    def abort(self, job_id: str) -> bool:
        """End all streams of a job, those still being handed over included; False when none ran."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        job.aborted = True
        return sum(self.llm.abort(stream.request_id) for stream in job.streams) > 0 or not job.streams

    def find_job(self, given: str) -> str | None:
        """A running job by its id, with or without the prefix of its route."""
        return next((found for found in (given, f"cmpl-{given}", f"chatcmpl-{given}", f"gen-{given}")
                     if found in self._jobs), None)

    async def finals(self, job: Job) -> list[RequestOutput]:
        """Every prompt's whole output; the job is over afterwards, whatever happens."""
        try:
            return [await stream.final() for stream in job.streams]
        finally:
            self.finish(job)


async def _all_or_none(handing_over: Sequence[Coroutine[Any, Any, OutputStream]]) -> list[OutputStream]:
    """All streams at once; when one is refused the others are closed."""
    tasks = [asyncio.ensure_future(one) for one in handing_over]
    try:
        await asyncio.wait(tasks)
        return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            if not task.cancel() and not task.cancelled() and task.exception() is None:
                task.result().close()
        raise


async def merged(streams: Sequence[OutputStream]) -> AsyncIterator[RequestOutput]:
    """The outputs of several streams, as they come."""
    waiting = {asyncio.ensure_future(stream.__anext__()): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                i = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(streams[i].__anext__())] = i
                yield output
    finally:
        for task in waiting:
            task.cancel()


def usage(outputs: Sequence[RequestOutput]) -> dict[str, object]:
    """OpenAI's usage object over the prompts of a request."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs if output.metrics is not None)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": cached}}
