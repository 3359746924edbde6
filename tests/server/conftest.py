"""A real server on a loopback port, in a thread, with a scripted engine behind it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest

from aspire.async_engine import AsyncConfig, AsyncLLM, EngineLike
from aspire.server.config import ServerConfig
from aspire.server.run import listen, make_server
from aspire.server.service import Service
from aspire.testing.fake_engine import FakeEngine


class LiveServer:
    """Starts on construction; `stop` is a graceful shutdown."""

    def __init__(self, engine: EngineLike, config: ServerConfig, async_config: AsyncConfig | None) -> None:
        self.engine = engine
        self.llm = AsyncLLM(engine, async_config)
        self._listener = listen(replace(config, port=0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(self.llm, config)
        self.service: Service = self.server.config.app.service
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[self._listener])), daemon=True)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, **options)

    def stop(self) -> float:
        """Seconds the shutdown took."""
        begun = time.monotonic()
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"
        self._listener.close()
        return time.monotonic() - begun

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Until no request lives, no block is held, and the metrics know it."""
        deadline = time.monotonic() + seconds
        while (self.llm.num_live or self.engine.stats().num_blocks_used or self.engine.has_unfinished
               or self.llm.stats.num_steps < self.engine.stats().num_steps):
            assert time.monotonic() < deadline, f"still {self.llm.num_live} live, {self.engine.stats()}"
            time.sleep(0.005)


Serve = Callable[..., LiveServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[LiveServer] = []

    def start(engine: EngineLike | None = None, *, async_config: AsyncConfig | None = None,
              **config: object) -> LiveServer:
        settings = {"shutdown_grace": 1.0, **config}
        server = LiveServer(engine or FakeEngine(), ServerConfig(**settings), async_config)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    """One server with defaults for tests that change nothing."""
    server = LiveServer(FakeEngine(), ServerConfig(shutdown_grace=1.0), None)
    yield server
    server.stop()
