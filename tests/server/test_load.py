"""Mixed load: 64 clients, 2,000 requests, 10 % cancelled midway, 5 % invalid. Right tokens, no leak, flat memory."""

import asyncio
import json
import random
import resource
from contextlib import suppress

import httpx
import pytest

from aspire.testing.fake_engine import FakeEngine

from .conftest import Serve

NUM_REQUESTS, NUM_CLIENTS = 2000, 64
INVALID = [{"temperature": -1.0}, {"max_tokens": 10**6}, {"no_such": 1}, {"prompt": [999]}, {"n": 0}]


@pytest.mark.slow
def test_mixed_load(serve: Serve) -> None:
    """Planted fault: one output's text given to another stream."""
    server = serve(FakeEngine(step_seconds=0.002))
    chance = random.Random(11)
    texts = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(3, 60))) for _ in range(NUM_REQUESTS)]
    kinds = chance.choices(["valid", "cancelled", "invalid"], [85, 10, 5], k=NUM_REQUESTS)
    counts = {"valid": 0, "cancelled": 0, "invalid": 0}

    async def ask(client: httpx.AsyncClient, i: int) -> None:
        body = {"prompt": texts[i], "max_tokens": 100, "stream": i % 2 == 0, "priority": i % 3}
        if kinds[i] == "invalid":
            answer = await client.post("/v1/completions", json={**body, **INVALID[i % len(INVALID)]})
            assert answer.status_code == 400
        elif kinds[i] == "cancelled":
            work = client.post("/v1/completions", json={**body, "max_tokens": 2000, "ignore_eos": True})
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(work, 0.05 + 0.1 * chance.random())
        else:
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200
            if body["stream"]:
                events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
                got = "".join(event["choices"][0]["text"] for event in events)
            else:
                got = answer.json()["choices"][0]["text"]
            assert got == texts[i][::-1], i
        counts[kinds[i]] += 1

    async def work() -> None:
        todo = iter(range(NUM_REQUESTS))
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
    assert sum(counts.values()) == NUM_REQUESTS
    assert server.service.num_jobs == 0
    assert grown < 100_000, f"memory grew by {grown} kB"
