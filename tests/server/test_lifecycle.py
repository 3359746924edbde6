"""Clients that leave, clients that never read, an engine that fails, SIGTERM under load: nothing leaks, all end."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from aspire.testing.fake_engine import FakeEngine

from .conftest import Serve

LONG: dict[str, Any] = {"prompt": "some prompt", "max_tokens": 3000, "ignore_eos": True}


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, limits=limits) as client:
        yield client


def test_two_hundred_random_disconnects(serve: Serve) -> None:
    """Streams and whole answers, at any moment. Planted fault: no watch for the disconnect of a whole answer."""
    engine = FakeEngine(step_seconds=0.002, max_num_seqs=32)
    server = serve(engine)
    chance = random.Random(5)

    async def one(client: httpx.AsyncClient, i: int) -> None:
        path = ("/v1/completions", "/generate", "/v1/chat/completions")[i % 3]
        body = {"/v1/completions": {**LONG, "stream": i % 2 == 0, "n": 1 + i % 3},
                "/generate": {"token_ids": [1, 2, 3], "stream": i % 2 == 0,
                              "sampling_params": {"max_tokens": 3000, "ignore_eos": True}},
                "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "stream": i % 2 == 0,
                                         "ignore_eos": True}}[path]
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.post(path, json=body), chance.random() * 0.3)

    async def work() -> None:
        async with clients(server.url) as client:
            for wave in range(10):
                await asyncio.gather(*(one(client, 20 * wave + i) for i in range(20)))
    asyncio.run(work())
    server.wait_idle()
    assert engine.stats().num_prompt_tokens > 500, "most requests reached the engine"
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "ab"}).json()["choices"][0]["text"] == "ba"
    assert server.llm.latency.finished.get("length", 0) == 0, "no request ran to its end"


def test_disconnect_takes_effect_within_a_step(serve: Serve) -> None:
    engine = FakeEngine(step_seconds=0.05)
    server = serve(engine)
    with server.client() as client, client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        next(answer.iter_lines())
    steps = engine.stats().num_steps
    server.wait_idle(1)
    assert engine.stats().num_steps <= steps + 3


def test_engine_failure_fails_all_streams_with_the_cause(serve: Serve) -> None:
    """Planted fault: ending the streams as if they were complete."""
    engine = FakeEngine(step_seconds=0.01)
    server = serve(engine)

    async def stream(client: httpx.AsyncClient) -> Any:
        answer = await client.post("/v1/completions", json={**LONG, "stream": True})
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")][-1]

    async def whole(client: httpx.AsyncClient) -> Any:
        answer = await client.post("/v1/completions", json=LONG)
        assert answer.status_code == 500
        return answer.json()

    async def work() -> None:
        async with clients(server.url) as client:
            assert (await client.get("/health")).status_code == 200
            asking = asyncio.gather(*(stream(client) for _ in range(8)), *(whole(client) for _ in range(4)))
            while engine.stats().num_running < 12:
                await asyncio.sleep(0.005)
            engine.fail_after = 0
            for last in await asking:
                assert last["error"]["code"] == "engine_dead"
                assert "injected failure" in last["error"]["message"]
            for path in ("/health", "/ready"):
                assert (await client.get(path)).status_code == 503
            assert (await client.post("/v1/completions", json=LONG)).status_code == 500
            assert (await client.get("/metrics")).status_code == 200
    asyncio.run(work())
    assert server.stop() < 3


def test_a_client_that_never_reads(serve: Serve) -> None:
    """It is cut off after the write timeout, holds nothing, and does not delay the shutdown. Planted fault: no
    watch on a blocked send."""
    server = serve(FakeEngine(tokens_per_step=8), write_timeout=0.5, shutdown_grace=1.0)
    body = json.dumps({**LONG, "stream": True, "logprobs": 20, "n": 6, "return_token_ids": True}).encode()
    request = (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
               + str(len(body)).encode() + b"\r\n\r\n" + body)
    stuck = []
    for _ in range(3):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(request)
        stuck.append(client)
    with server.client() as reader:
        assert reader.post("/v1/completions", json={"prompt": "ab"}).json()["choices"][0]["text"] == "ba"
    server.wait_idle(15)
    deadline = time.monotonic() + 3
    while server.service.num_jobs:
        assert time.monotonic() < deadline, "the handlers still wait for the clients"
        time.sleep(0.01)
    assert server.stop() < 4
    for client in stuck:
        client.close()


def test_shutdown_lets_running_requests_finish(serve: Serve) -> None:
    server = serve(FakeEngine(step_seconds=0.01), shutdown_grace=5.0)

    async def work() -> None:
        async with clients(server.url) as client:
            running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x" * 90, "max_tokens": 90}))
            while not server.llm.num_live:
                await asyncio.sleep(0.001)
            took = await asyncio.to_thread(server.stop)
            answer = await running
            assert answer.json()["choices"][0]["text"] == "x" * 90
            assert took < 2
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")
    asyncio.run(work())


def test_draining_is_told_until_the_end(serve: Serve) -> None:
    """Load balancers ask a server that still answers: not ready, alive, no new requests. Planted fault: uvicorn's own
    order, which stops listening first."""
    server = serve(FakeEngine(step_seconds=0.02), shutdown_grace=5.0)

    async def work() -> None:
        async with clients(server.url) as client:
            assert (await client.get("/ready")).status_code == 200
            running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x" * 90, "max_tokens": 90}))
            while not server.llm.num_live:
                await asyncio.sleep(0.001)
            stopping = asyncio.create_task(asyncio.to_thread(server.stop))
            while server.llm.accepting:
                await asyncio.sleep(0.001)
            async with clients(server.url) as balancer:  # on connections of its own
                assert (await balancer.get("/ready")).status_code == 503
                assert (await balancer.get("/health")).status_code == 200
                refused = await balancer.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.headers["Retry-After"]
            assert not running.done(), "it was asked while a request ran"
            assert (await running).json()["choices"][0]["text"] == "x" * 90
            await stopping
    asyncio.run(work())


@pytest.mark.parametrize(("step", "fields", "end"), [
    (30.0, {}, "abort"), (0.01, {"structured_outputs": {"regex": "sleep 30"}}, None)], ids=["step", "grammar"])
def test_exit_does_not_wait_for_the_engine(step: float, fields: dict[str, Any], end: str | None) -> None:
    """A step of a large model, or a grammar, that takes far longer than the grace time: the client hears of its end,
    and the process is gone. Planted faults: aborting through the stepping thread; no _leave_unfinished_work."""
    port, grace = free_port(), 1
    process = fake_server(port, step, grace)

    async def work() -> tuple[httpx.Response, float]:
        async with clients(f"http://127.0.0.1:{port}") as client:
            await until_up(client)
            asking = asyncio.create_task(client.post("/v1/completions", json={**LONG, **fields}))
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            signalled = time.monotonic()
            [answer] = await asyncio.gather(asking, return_exceptions=True)
            await asyncio.to_thread(process.wait, 20)
            return answer, time.monotonic() - signalled
    try:
        answer, took = asyncio.run(work())
    finally:
        process.kill()
    assert took < grace + 4
    assert process.returncode == 0
    if end is not None:
        assert answer.json()["choices"][0]["finish_reason"] == end


def fake_server(port: int, step: float, grace: int) -> "subprocess.Popen[str]":
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("serve_fake.py")), str(port), str(step), str(grace)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source})


async def until_up(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        try:
            await client.get("/health")
        except httpx.ConnectError:
            await asyncio.sleep(0.025)
        else:
            return
    raise AssertionError("the server did not come up")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(("number", "step", "grace", "end"), [(signal.SIGTERM, 0.05, 1, "abort"),
                                                              (signal.SIGINT, 0.003, 15, "length")],
                         ids=["SIGTERM cuts off", "SIGINT drains"])
def test_signal_under_load(number: signal.Signals, step: float, grace: int, end: str) -> None:
    """A real process: every stream ends properly, the exit status is 0, within the grace time. Planted fault: uvicorn's
    own shutdown, which cancels or waits for ever."""
    port = free_port()
    process = fake_server(port, step, grace)
    url = f"http://127.0.0.1:{port}"

    begun: set[int] = set()

    async def stream(client: httpx.AsyncClient, i: int) -> str | None:
        finish = None
        async with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 600, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    begun.add(i)
                    finish = json.loads(line[6:])["choices"][0]["finish_reason"]
        return finish

    async def work() -> tuple[list[str | None], float]:
        async with clients(url) as client:
            await until_up(client)
            streams = [asyncio.create_task(stream(client, i)) for i in range(30)]
            while len(begun) < 30:
                await asyncio.sleep(0.005)
            process.send_signal(number)
            signalled = time.monotonic()
            ends = await asyncio.gather(*streams)
            await asyncio.to_thread(process.wait, 10)
            return ends, time.monotonic() - signalled
    try:
        ends, took = asyncio.run(work())
    finally:
        process.kill()
    assert set(ends) == {end}
    assert process.returncode == 0
    assert took < grace + 2.5
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
