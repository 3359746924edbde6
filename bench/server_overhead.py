"""What the HTTP server adds to an engine: time of a request, and throughput at 64 streams.

A scripted engine sleeps for its step, so whatever is slower than the engine alone is the server's doing. Measured:
- added_ms_median: streamed requests of one engine step, one after the other on a kept connection, nothing else running.
  From before the request is written until the end of its answer was read, client included; median, minus the median of
  the same request put to the engine directly.
- added_ms_median_busy: the same as the last of the streams, while the others run: both sides wait for the engine's
  current step to end, and in both the request's step has all streams in it.
- throughput_lost: share of the time that all streams together take longer than on the engine alone, from the first
  request's writing (all arrive at once) to the last answer's end.
Clients are bare socket readers: one in this process, the others in their own; the server runs in a third. Prints one
JSON line last, with the machine's load before.
"""

import argparse
import asyncio
import json
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
TOKENS_PER_STEP = 3
ENDING = b"\r\n0\r\n\r\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600, help="engine steps of each stream")
    parser.add_argument("--requests", type=int, default=200, help="single requests, one after the other")
    parser.add_argument("--background", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.background is not None:
        asyncio.run(together(arguments.background, arguments))
        return
    load = os.getloadavg()[0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "server" / "serve_fake.py"), str(port), str(arguments.step_seconds), "1"],
        stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    try:
        result = measure(port, arguments)
    finally:
        server.terminate()
        server.wait(10)
    print(json.dumps({"load_before": load, **result}))


def measure(port: int, arguments: argparse.Namespace) -> dict[str, float]:
    until_up(port)
    connection = socket.create_connection(("127.0.0.1", port))
    single = [request(connection) for _ in range(arguments.requests)]
    alone = [engine_alone(arguments, streams=1, steps=1)[0] for _ in range(arguments.requests // 4)]
    added = statistics.median(single) - statistics.median(alone)
    busy = probe(port, arguments, connection)
    added_busy = statistics.median(busy) - statistics.median(engine_busy(arguments, len(busy)))
    engine, engine_cpu = engine_alone(arguments, streams=arguments.streams, steps=arguments.steps)
    begun, cpu = time.perf_counter(), children_cpu()
    asyncio.run(together(port, arguments))
    through = time.perf_counter() - begun
    chunks = arguments.streams * arguments.steps
    own_cpu = children_cpu() - cpu - engine_cpu
    return {"step_ms": 1e3 * arguments.step_seconds, "added_ms_median": 1e3 * added,
            "added_ms_median_busy": 1e3 * added_busy, "engine_tokens_per_second": chunks * TOKENS_PER_STEP / engine,
            "server_tokens_per_second": chunks * TOKENS_PER_STEP / through,
            "throughput_lost": 1 - engine / through, "server_cpu_us_per_chunk": 1e6 * own_cpu / chunks}


async def together(port: int, arguments: argparse.Namespace) -> None:
    await asyncio.gather(*(stream(port, TOKENS_PER_STEP * arguments.steps) for _ in range(arguments.streams)))


def probe(port: int, arguments: argparse.Namespace, connection: socket.socket) -> list[float]:
    """Single requests, at random moments of the steps, while all streams run."""
    chance = random.Random(1)
    background = subprocess.Popen([sys.executable, __file__, "--background", str(port), "--steps",
                                   str(arguments.steps), "--streams", str(arguments.streams - 1)])
    seconds = []
    try:
        time.sleep(1)  # until they run
        for _ in range(arguments.requests):
            time.sleep(arguments.step_seconds * chance.random())
            seconds.append(request(connection))
            if background.poll() is not None:
                return seconds[:-1]
    finally:
        background.kill()
        background.wait()
    return seconds


def engine_busy(arguments: argparse.Namespace, num_probes: int) -> list[float]:
    """What `probe` would take if requests reached the engine by themselves."""
    from aspire.request import SamplingParams
    from aspire.testing.fake_engine import FakeEngine

    engine, chance = FakeEngine(step_seconds=arguments.step_seconds), random.Random(1)
    endless = SamplingParams(max_tokens=FakeEngine().max_model_len - 3, ignore_eos=True)
    for i in range(arguments.streams - 1):
        engine.add(str(i), [97, 98, 99], endless)
    arriving: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=TOKENS_PER_STEP, ignore_eos=True)

    over = threading.Event()

    def step() -> None:
        while engine.has_unfinished and not over.is_set():
            while not arriving.empty():
                engine.add(arriving.get(), [97, 98, 99], params)
            for output in engine.step():
                if output.finished and output.request_id.startswith("probe"):
                    done.put(output.request_id)
    thread = threading.Thread(target=step)
    thread.start()
    seconds = []
    for i in range(num_probes):
        time.sleep(arguments.step_seconds * chance.random())
        begun = time.perf_counter()
        arriving.put(f"probe{i}")
        done.get()
        seconds.append(time.perf_counter() - begun)
    over.set()
    thread.join()
    return seconds


def engine_alone(arguments: argparse.Namespace, *, streams: int, steps: int) -> tuple[float, float]:
    """Seconds the engine takes for the same streams without any server, and its own CPU seconds."""
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


def written(max_tokens: int) -> bytes:
    body = json.dumps({"prompt": [97, 98, 99], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body))


def request(connection: socket.socket) -> float:
    """Seconds from asking to the end of a stream of one engine step."""
    begun, end = time.perf_counter(), b""
    connection.sendall(written(TOKENS_PER_STEP))
    while end != ENDING:
        data = connection.recv(1 << 16)
        assert data, "the stream must end properly"
        end = (end + data)[-len(ENDING):]
    return time.perf_counter() - begun


async def stream(port: int, max_tokens: int) -> None:
    """One of many streams, on a connection of its own, to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(written(max_tokens))
    end = b""
    while end != ENDING:
        data = await reader.read(1 << 16)
        assert data, "the stream must end properly"
        end = (end + data)[-len(ENDING):]
    writer.close()


def until_up(port: int) -> None:
    for _ in range(1200):
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                request(connection)
                return
        except ConnectionError:
            time.sleep(0.025)
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
