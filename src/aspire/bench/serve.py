"""Open-loop load on a running server: requests leave at their own times, whatever the server's state.

Flags and figures follow `vllm bench serve`. Knows HTTP and nothing of the engine; report in serve_report.py.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

BACKENDS = ("openai", "vllm", "openai-chat")
DATASETS = ("random", "custom", "sharegpt")
RAMPS = ("linear", "exponential")
ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what they all carry."""

    base_url: str
    endpoint: str
    backend: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # sampling fields of the body


@dataclass(frozen=True, slots=True)
class LoadRequest:
    prompt: str | tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests leave. rate: requests a second, inf: all at once. burstiness: shape of the gamma distribution of
    gaps, 1 is Poisson. ramp: the rate goes from `ramp_start` to `ramp_end` over the run."""

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: str | None = None
    ramp_start: float = 1.0
    ramp_end: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness", "ramp_start", "ramp_end"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)!r}")
        if self.ramp is not None and self.ramp not in RAMPS:
            raise ValueError(f"ramp must be one of {', '.join(RAMPS)}, got {self.ramp!r}")

    def times(self, count: int, rng: random.Random) -> list[float]:
        """Seconds from the start, ascending; without a ramp they are scaled so that the mean rate is exact."""
        if math.isinf(self.rate) and self.ramp is None:
            return [0.0] * count
        now, result = 0.0, []
        for i in range(count):
            rate = self._rate(i / max(1, count - 1))
            gap = 1 / rate if math.isinf(self.burstiness) else rng.gammavariate(self.burstiness,
                                                                               1 / (rate * self.burstiness))
            now += gap
            result.append(now)
        if self.ramp is None and now > 0:
            scale = count / self.rate / now
            result = [moment * scale for moment in result]
        return result

    def _rate(self, progress: float) -> float:
        if self.ramp == "linear":
            return self.ramp_start + (self.ramp_end - self.ramp_start) * progress
        if self.ramp == "exponential":
            return self.ramp_start * math.pow(self.ramp_end / self.ramp_start, progress)
        return self.rate


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds; gaps[i] lies between the pieces i and i + 1 of its text."""

    start: float = 0.0
    first: float | None = None  # from the start to the first piece
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    text: str = ""
    error: str | None = None


async def run_load(target: Target, requests: Sequence[LoadRequest], arrivals: Arrivals, *, seed: int = 0,
                   max_concurrency: int | None = None) -> tuple[list[Outcome], float]:
    """Outcomes in the order of the requests, and the seconds from the first start to the last end."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    gate = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    async with httpx.AsyncClient(base_url=target.base_url, timeout=None, limits=limits, trust_env=False,
                                 headers=headers) as client:
        begun = time.perf_counter()

        async def at(moment: float, request: LoadRequest) -> Outcome:
            await asyncio.sleep(max(0.0, begun + moment - time.perf_counter()))
            async with gate:
                return await send(client, target, request)
        times = arrivals.times(len(requests), random.Random(seed))
        outcomes = await asyncio.gather(*(at(*pair) for pair in zip(times, requests, strict=True)))
        return list(outcomes), time.perf_counter() - begun


async def send(client: httpx.AsyncClient, target: Target, request: LoadRequest) -> Outcome:
    """Stream one answer and time its pieces. Failures are recorded, not raised."""
    outcome = Outcome(start=time.perf_counter())
    last = outcome.start
    try:
        async with client.stream("POST", target.endpoint, json=body_of(target, request)) as answer:
            if answer.status_code != 200:
                outcome.error = f"HTTP {answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}"
                return outcome
            async for event in events(answer.aiter_raw()):
                now = time.perf_counter()
                if _take(outcome, event):
                    if outcome.first is None:
                        outcome.first = now - outcome.start
                    else:
                        outcome.gaps.append(now - last)
                    last = now
    except (httpx.HTTPError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.latency = last - outcome.start
    if outcome.error is None and outcome.first is None:
        outcome.error = "the answer had no text"
    return outcome


def body_of(target: Target, request: LoadRequest) -> dict[str, Any]:
    common = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}, **target.extra}
    if target.backend == "openai-chat":
        return {"messages": [{"role": "user", "content": request.prompt}],
                "max_completion_tokens": request.max_tokens, **common}
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    return {"prompt": prompt, "max_tokens": request.max_tokens, **common}


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, up to [DONE]."""
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield json.loads(line[6:])


def _take(outcome: Outcome, event: dict[str, Any]) -> bool:
    """Note what an event says; whether it brought text."""
    if "error" in event:
        outcome.error = str(event["error"].get("message", event["error"]))
        return False
    usage = event.get("usage")
    if usage:
        outcome.num_prompt, outcome.num_output = usage["prompt_tokens"], usage["completion_tokens"]
    text = ""
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        text += choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    outcome.text += text
    return bool(text)


def random_requests(count: int, lengths: tuple[int, int], *, spread: float, prefix: int, vocab_size: int,
                    seed: int) -> list[LoadRequest]:
    """Prompts of random token ids. lengths: mean prompt and output tokens; each varies by up to `spread` of itself.
    prefix: tokens that all prompts share, besides."""
    rng = random.Random(seed)
    if not 0 <= spread < 1:
        raise ValueError(f"random_range_ratio must be in [0, 1), got {spread!r}")
    shared = tuple(rng.randrange(vocab_size) for _ in range(prefix))

    def vary(mean: int) -> int:
        return max(1, rng.randint(math.floor(mean * (1 - spread)), math.ceil(mean * (1 + spread))))

    return [LoadRequest(shared + tuple(rng.randrange(vocab_size) for _ in range(vary(lengths[0]))), vary(lengths[1]))
            for _ in range(count)]


def file_requests(dataset: str, path: str, count: int, max_tokens: int | None, seed: int) -> list[LoadRequest]:
    """custom: JSON lines with "prompt" (and "output_tokens"). sharegpt: a JSON list of conversations; the output
    length is that of the recorded answer, at about four characters a token, unless max_tokens is given."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"dataset_path must be a readable file, got {path!r} ({error})") from error
    try:
        if dataset == "custom":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            made = [LoadRequest(row["prompt"], max_tokens or int(row.get("output_tokens", 256))) for row in rows]
        else:
            talks = [entry["conversations"] for entry in json.loads(text) if len(entry["conversations"]) >= 2]
            made = [LoadRequest(talk[0]["value"], max_tokens or max(1, len(talk[1]["value"]) // 4)) for talk in talks]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"dataset_path must hold a {dataset} data set, got {path!r} ({error!r})") from error
    if not made:
        raise ValueError(f"dataset_path must hold at least one prompt, got {path!r}")
    random.Random(seed).shuffle(made)
    return [made[i % len(made)] for i in range(count)]


def as_text(requests: Sequence[LoadRequest]) -> list[LoadRequest]:
    """Chat takes no token ids: a word for each."""
    return [LoadRequest(request.prompt if isinstance(request.prompt, str) else
                        " ".join(f"w{token}" for token in request.prompt), request.max_tokens) for request in requests]
