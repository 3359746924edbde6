"""The server over the real engine with a tiny random model: same tokens as the offline API, nothing leaks."""

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from aspire import LLM, AsyncLLM, SamplingParams
from aspire.server.config import ServerConfig
from aspire.testing.models import tiny_model

from .conftest import LiveServer

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "num_blocks": 96, "block_size": 8}
PROMPTS = ["".join(random.Random(i).choices("abcdef ghij", k=10 + 9 * i)) for i in range(10)]
PARAMS = [{"max_tokens": 20 + 3 * i, "temperature": 0.9 * (i % 2), "seed": i, "ignore_eos": True} for i in range(10)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def make_llm(model: Path, **options: Any) -> LLM:
    merged = {name: value for name, value in {**OPTIONS, **options}.items() if value is not None}
    return LLM(str(model), **merged)


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[LiveServer]:
    server = LiveServer(make_llm(model).engine, ServerConfig(shutdown_grace=2.0), None)
    yield server
    server.stop()


async def post_all(server: LiveServer, bodies: list[dict[str, Any]]) -> list[Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    return [answer.text if body.get("stream") else answer.json() for answer, body in zip(answers, bodies, strict=True)]


def streamed_tokens(text: str) -> list[int]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def test_same_tokens_as_offline_autoregressive(model: Path, live: LiveServer) -> None:
    """Ten concurrent clients, streaming or not, greedy or sampled. Planted fault: the seed not passed on."""
    offline = make_llm(model, policy="autoregressive").generate(
        PROMPTS, [SamplingParams(**params) for params in PARAMS], use_tqdm=False)
    bodies = [{"prompt": prompt, "stream": i % 3 == 0, "return_token_ids": True, **params}
              for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))]
    for answer, body, expected in zip(asyncio.run(post_all(live, bodies)), bodies, offline, strict=True):
        got = streamed_tokens(answer) if body["stream"] else answer["choices"][0]["token_ids"]
        assert got == list(expected.outputs[0].token_ids)
        if not body["stream"]:
            assert answer["choices"][0]["text"] == expected.outputs[0].text
    live.wait_idle()


def test_echoed_logprobs_agree_with_generated_ones(live: LiveServer) -> None:
    """Scoring a text gives what generating it gave. Planted fault: prompt log probabilities shifted by one."""
    [made] = asyncio.run(post_all(live, [{"prompt": "abc def", "max_tokens": 12, "temperature": 0.0, "logprobs": 3,
                                          "ignore_eos": True, "return_token_ids": True}]))
    choice = made["choices"][0]
    whole = choice["prompt_token_ids"] + choice["token_ids"]
    [scored] = asyncio.run(post_all(live, [{"prompt": whole, "max_tokens": 0, "echo": True, "logprobs": 3}]))
    assert scored["choices"][0]["logprobs"]["token_logprobs"][-12:] == pytest.approx(
        choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert scored["choices"][0]["logprobs"]["tokens"][-12:] == choice["logprobs"]["tokens"]
    assert scored["choices"][0]["logprobs"]["token_logprobs"][0] is None


def test_several_outputs_differ_and_share_the_prompt(live: LiveServer) -> None:
    [made] = asyncio.run(post_all(live, [{"prompt": PROMPTS[5], "n": 3, "seed": 4, "max_tokens": 16,
                                          "ignore_eos": True}]))
    texts = [choice["text"] for choice in made["choices"]]
    assert len(set(texts)) == 3
    live.wait_idle()


def test_json_schema_is_obeyed(live: LiveServer) -> None:
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
              "required": ["a", "b"], "additionalProperties": False}
    with live.client() as client:
        for seed in range(4):
            answer = client.post("/v1/chat/completions", json={
                "messages": [{"role": "user", "content": "go"}], "seed": seed, "max_tokens": 120,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}})
            said = answer.json()["choices"][0]
            assert said["finish_reason"] == "stop", said
            value = json.loads(said["message"]["content"])
            assert set(value) == {"a", "b"}


def test_bad_schemas_are_refused(live: LiveServer) -> None:
    pytest.importorskip("xgrammar")
    with live.client() as client:
        for field in ({"guided_regex": "("}, {"guided_grammar": "nonsense ::="}, {"guided_json": {"type": "nonsense"}}):
            answer = client.post("/v1/completions", json={"prompt": "x", **field})
            assert answer.status_code == 400, (field, answer.text)
        assert client.get("/health").status_code == 200


def test_disconnects_return_all_blocks(live: LiveServer) -> None:
    chance = random.Random(3)

    async def one(client: httpx.AsyncClient, i: int) -> None:
        body = {"prompt": PROMPTS[i % 10], "max_tokens": 100, "ignore_eos": True, "stream": i % 2 == 0, "n": 1 + i % 2}
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.post("/v1/completions", json=body), 0.02 + 0.2 * chance.random())

    async def work() -> None:
        async with httpx.AsyncClient(base_url=live.url, timeout=30, trust_env=False) as client:
            for wave in range(4):
                await asyncio.gather(*(one(client, wave + i) for i in range(10)))
    asyncio.run(work())
    live.wait_idle(10)
    live.engine.scheduler.check()  # type: ignore[attr-defined]


def test_chat_and_dashboards_of_numbers(live: LiveServer) -> None:
    with live.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}],
                                                           "max_tokens": 8, "temperature": 0.0, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 8
        live.wait_idle()
        text = client.get("/metrics").text
    assert "vllm:spec_decode_num_accepted_tokens_total" in text
    assert live.engine.stats().num_output_tokens > 0


def test_async_llm_from_a_model(model: Path) -> None:
    """The same tokens as LLM gives, under asyncio."""
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    [expected] = make_llm(model).generate(["abc abc"], params, use_tqdm=False)

    async def work() -> tuple[int, ...]:
        llm = AsyncLLM.from_model(str(model), **OPTIONS)
        outputs = [output async for output in llm.generate("abc abc", params)]
        await llm.drain(1)
        return outputs[-1].outputs[0].token_ids
    assert asyncio.run(work()) == expected.outputs[0].token_ids


def test_a_failing_step_turns_health_red(model: Path) -> None:
    """Planted fault: AsyncLLM retrying a failed step."""
    engine = make_llm(model).engine
    server = LiveServer(engine, ServerConfig(shutdown_grace=1.0), None)
    try:
        with server.client() as client:
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200

            def broken() -> Any:
                raise RuntimeError("device lost")
            engine.step = broken  # type: ignore[method-assign]
            answer = client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 500
            assert "device lost" in answer.json()["error"]["message"]
            assert client.get("/health").status_code == 503
    finally:
        server.stop()
