"""What the HTTP server adds to an engine: time per request, and throughput lost at 64 streams.

A scripted engine sleeps for its step, so whatever is slower than steps times step time is the server's doing. The
client is a bare socket reader in this process; the server runs in its own. Prints one JSON line last.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKENS_PER_STEP = 3
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600, help="engine steps of each stream")
    parser.add_argument("--requests", type=int, default=200, help="single requests, one after the other")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "server" / "serve_fake.py"), str(port), str(arguments.step_seconds), "1"],
        stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    try:
        result = asyncio.run(measure(port, arguments))
    finally:
        server.terminate()
        server.wait(10)
    print(json.dumps(result))


async def measure(port: int, arguments: argparse.Namespace) -> dict[str, float]:
    await until_up(port)
    connection = await asyncio.open_connection("127.0.0.1", port)
    single = [await request(port, TOKENS_PER_STEP, connection) for _ in range(arguments.requests)]
    alone = [engine_alone(arguments, streams=1, steps=1)[0] for _ in range(arguments.requests // 4)]
    added = statistics.median(single) - statistics.median(alone)
    engine, engine_cpu = engine_alone(arguments, streams=arguments.streams, steps=arguments.steps)
    begun, cpu = time.perf_counter(), children_cpu()
    await asyncio.gather(*(request(port, TOKENS_PER_STEP * arguments.steps) for _ in range(arguments.streams)))
    through = time.perf_counter() - begun
    chunks = arguments.streams * arguments.steps
    own_cpu = children_cpu() - cpu - engine_cpu
    return {"step_ms": 1e3 * arguments.step_seconds, "added_ms_median": 1e3 * added,
            "engine_tokens_per_second": chunks * TOKENS_PER_STEP / engine,
            "server_tokens_per_second": chunks * TOKENS_PER_STEP / through,
            "throughput_lost": 1 - engine / through, "server_cpu_us_per_chunk": 1e6 * own_cpu / chunks}


def engine_alone(arguments: argparse.Namespace, *, streams: int, steps: int) -> tuple[float, float]:
    """Seconds the engine takes for the same streams without any server, and its own CPU seconds."""
    sys.path.insert(0, str(ROOT / "src"))
    from aspire.request import SamplingParams
    from aspire.testing.fake_engine import FakeEngine

    engine = FakeEngine(step_seconds=arguments.step_seconds)
    params = SamplingParams(max_tokens=TOKENS_PER_STEP * steps, ignore_eos=True)
    begun, cpu = time.perf_counter(), time.process_time()
    for i in range(streams):
        engine.add(str(i), [97, 98, 99], params)
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - begun, time.process_time() - cpu


async def request(port: int, max_tokens: int, connection: Connection | None = None) -> float:
    """Seconds from asking to the end of a stream; on a connection of its own unless given one."""
    body = json.dumps({"prompt": [97, 98, 99], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()
    begun = time.perf_counter()
    reader, writer = connection or await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    end = b""
    while end != b"\r\n0\r\n\r\n":
        data = await reader.read(1 << 16)
        assert data, "the stream must end properly"
        end = (end + data)[-7:]
    seconds = time.perf_counter() - begun
    if connection is None:
        writer.close()
    return seconds


async def until_up(port: int) -> None:
    for _ in range(1200):
        try:
            await request(port, 1)
        except ConnectionError:
            await asyncio.sleep(0.025)
        else:
            return
    raise RuntimeError("the server did not come up")


def children_cpu() -> float:
    """CPU seconds of our children so far, from /proc."""
    total = 0.0
    for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


if __name__ == "__main__":
    main()
