"""Mixed load: 64 clients, 2,000 requests, 10 % cancelled midway, 5 % invalid. Right tokens, no leak, flat memory."""

import asyncio
import json
import random
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from aspire.async_engine import EngineLike
from aspire.testing.fake_engine import FakeEngine

from .conftest import Serve

NUM_CLIENTS = 64
INVALID = [{"temperature": -1.0}, {"max_tokens": 10**6}, {"no_such": 1}, {"prompt": [999]}, {"n": 0}]
Bodies = list[dict[str, Any]]


def make_bodies(count: int, longest: int) -> Bodies:
    """Prompts that differ, greedy and sampled, streamed and whole."""
    chance = random.Random(11)
    return [{"prompt": "".join(chance.choices("abcdefghijklmnop", k=chance.randint(3, longest))), "seed": i,
             "max_tokens": 100 if longest > 20 else chance.randint(1, 12), "temperature": 0.7 * (i % 2),
             "stream": i % 3 == 0, "priority": i % 4} for i in range(count)]


def fake_engine(bodies: Bodies, tmp_path: Path) -> tuple[EngineLike, list[str]]:
    return FakeEngine(step_seconds=0.002), [body["prompt"][::-1] for body in bodies]


def real_engine(bodies: Bodies, tmp_path: Path) -> tuple[EngineLike, list[str]]:
    """A tiny random model; plain decoding offline says what the texts must be."""
    import torch

    from aspire import LLM, SamplingParams
    from aspire.testing.models import tiny_model

    torch.set_num_threads(1)
    model = str(tiny_model(tmp_path / "model"))
    options: Any = {"max_model_len": 128, "max_num_seqs": 32, "block_size": 8, "num_blocks": 400}
    params = [SamplingParams(seed=body["seed"], max_tokens=body["max_tokens"], temperature=body["temperature"])
              for body in bodies]
    plain = LLM(model, policy="autoregressive", **options).generate([body["prompt"] for body in bodies], params,
                                                                    use_tqdm=False)
    return LLM(model, **options).engine, [output.outputs[0].text for output in plain]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "count", "longest"), [(fake_engine, 400, 60), (real_engine, 2000, 12)],
                         ids=["scripted", "tiny model"])
def test_mixed_load(serve: Serve, make: Callable[..., tuple[EngineLike, list[str]]], count: int, longest: int,
                    tmp_path: Path) -> None:
    """Planted fault: one output's text given to another stream."""
    bodies = make_bodies(count, longest)
    engine, expected = make(bodies, tmp_path)
    server = serve(engine)
    chance = random.Random(12)
    kinds = chance.choices(["valid", "cancelled", "invalid"], [85, 10, 5], k=count)
    num_done = 0

    async def ask(client: httpx.AsyncClient, i: int) -> None:
        nonlocal num_done
        if kinds[i] == "invalid":
            answer = await client.post("/v1/completions", json={**bodies[i], **INVALID[i % len(INVALID)]})
            assert answer.status_code == 400
        elif kinds[i] == "cancelled":
            endless = {**bodies[i], "max_tokens": 100, "ignore_eos": True}
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(client.post("/v1/completions", json=endless), 0.02 + 0.2 * chance.random())
        else:
            answer = await client.post("/v1/completions", json=bodies[i])
            assert answer.status_code == 200
            assert text_of(answer, bodies[i]["stream"]) == expected[i], i
        num_done += 1

    async def work() -> None:
        todo = iter(range(count))
        limits = httpx.Limits(max_connections=None)

        async def client_loop(client: httpx.AsyncClient) -> None:
            for i in todo:
                await ask(client, i)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, limits=limits) as client:
            await asyncio.gather(*(client_loop(client) for _ in range(NUM_CLIENTS)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(work())
    server.wait_idle()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert num_done == count
    assert server.service.num_jobs == 0
    assert grown < 100_000, f"memory grew by {grown} kB"


def text_of(answer: httpx.Response, stream: bool) -> str:
    if not stream:
        return str(answer.json()["choices"][0]["text"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)
