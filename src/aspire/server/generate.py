"""POST /generate: token ids in, token ids and log probabilities out, for reinforcement learning and evaluation."""
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from aspire.request import CompletionOutput, RequestMetrics, RequestOutput
from aspire.schedule.plan import TokenLogprobs
from aspire.server.errors import bad_request
from aspire.server.logprobs import finite
from aspire.server.protocol import GenerateRequest
from aspire.server.sampling import generate_params
from aspire.server.service import Delta, Progress, Prompt, Service, usage
from aspire.server.sse import event
from aspire.server.stream import stream_job
from aspire.server.watch import ClientWatch


async def generate(service: Service, body: GenerateRequest, request: Request) -> ASGIApp:
    """The route. Raises ApiError, and what Service.start raises."""
    model = service.check_model(body.model)
    if (body.token_ids is None) == (body.prompt is None):
        raise bad_request("exactly one of token_ids and prompt must be given", "token_ids")
    if body.token_ids is not None:
        service.check_tokens(body.token_ids, "token_ids")
        prompt = Prompt(body.token_ids)
    else:
        prompt = Prompt(await service.llm.encode(body.prompt or ""), body.prompt)
    service.room(prompt, body.sampling_params.max_tokens)
    params = generate_params(body.sampling_params, service.config, service.vocab_size)
    job_id = service.new_id("gen-", request, body.request_id)
    starting = service.start(job_id, [prompt], [params], priority=body.priority, timeout=body.timeout)
    if body.stream:
        return stream_job(service, starting, partial(Chunker, service, job_id, body.sampling_params.n))
    with ClientWatch(request.receive):
        [output] = await service.finals(await starting)
    answer: dict[str, object] = {
        "request_id": job_id, "model": model, "prompt_token_ids": list(output.prompt_token_ids),
        "choices": [_choice(part) for part in output.outputs], "usage": usage([output])}
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [None if entry is None else _entry(entry) for entry in output.prompt_logprobs]
    return JSONResponse(answer)


class Chunker:
    """Writes a streamed answer: see aspire.server.stream.Writer."""

    def __init__(self, service: Service, job_id: str, num_outputs: int) -> None:
        self._service, self._id = service, job_id
        self._shown = [Progress() for _ in range(num_outputs)]

    def begin(self) -> bytes:
        return b""

    def write(self, index: int, output: RequestOutput) -> bytes:
        pieces = []
        for part in output.outputs:
            delta = self._shown[part.index].advance(part)
            if delta is not None:
                pieces.append(self._event(delta, part))
        return b"".join(pieces)

    def end(self) -> bytes:
        return b""

    def _event(self, delta: Delta, part: CompletionOutput) -> bytes:
        chunk: dict[str, object] = {
            "request_id": self._id, "index": delta.index, "text": delta.text,
            "token_ids": list(delta.token_ids), "num_accepted": delta.num_accepted,
            "num_accepted_chars": _accepted_chars(self._service, delta),
            "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if delta.logprobs is not None:
            chunk["logprobs"] = [_entry(entry) for entry in delta.logprobs]
        if delta.finish_reason is not None:
            chunk["metrics"] = _metrics(part.metrics)
        return event(chunk)


def _accepted_chars(service: Service, delta: Delta) -> int | None:
    """How many characters of a piece stem from accepted drafts: all but the last token's. None when the piece spans
    several verifications, whose places are not known."""
    if delta.num_accepted != len(delta.token_ids) - 1:
        return None if delta.num_accepted else 0
    last = service.token_text.text(delta.token_ids[-1])
    return len(delta.text) - (len(last) if delta.text.endswith(last) else 0)


def _choice(part: CompletionOutput) -> dict[str, object]:
    logprobs = None if part.logprobs is None else [_entry(entry) for entry in part.logprobs]
    return {"index": part.index, "text": part.text, "token_ids": list(part.token_ids), "logprobs": logprobs,
            "finish_reason": part.finish_reason, "stop_reason": part.stop_reason, "metrics": _metrics(part.metrics)}


def _entry(entry: TokenLogprobs) -> dict[str, object]:
    return {"token_id": entry.token_id, "logprob": finite(entry.logprob), "rank": entry.rank,
            "top": [[token, finite(value)] for token, value in entry.top]}


def _metrics(metrics: RequestMetrics | None) -> dict[str, object] | None:
    if metrics is None:
        return None
    return {"num_drafted": metrics.num_drafted, "num_accepted": metrics.num_accepted,
            "num_verifications": metrics.num_verifications, "num_preempted": metrics.num_preempted,
            "num_cached_tokens": metrics.num_cached_tokens, "acceptance_rate": metrics.acceptance_rate,
            "tokens_per_verification": metrics.tokens_per_verification}
