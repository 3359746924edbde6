"""From an engine to a listening server, and down again: stop accepting, drain, cut off what is left.

`python -m aspire.server` and `aspire serve` end here.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

import uvicorn

from aspire.async_engine import AsyncConfig, AsyncLLM, EngineLike
from aspire.config import EngineOptions
from aspire.request import SamplingParams
from aspire.server.app import create_app
from aspire.server.config import ServerConfig
from aspire.server.sampling import OPTIONAL_FIELDS

# With the interpreter's 5 ms between thread switches, the stepping thread would hold up every stream by as much.
SWITCH_INTERVAL = 0.0005
COLLECT_AFTER = 10_000  # more objects made than freed; the default, 700, collects in the middle of every request
IDLE_THREAD_SECONDS = 0.2  # more than an idle thread needs to end once it was told to
LONGEST_MILLISECONDS = 2**31 - 1  # that the kernel takes
LAST_WORDS_SECONDS = 2  # after the grace time, for clients to take the ends of their answers

logger = logging.getLogger("aspire.server")


class DrainingServer(uvicorn.Server):
    """A server whose shutdown lets running requests finish within the grace time, and then cuts them off.

    Until then it answers: /ready says 503 and new requests are refused with 503, as load balancers expect."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, grace: float) -> None:
        super().__init__(config)
        self._llm = llm
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("shutting down: up to %g s for %d running requests", self._grace, self._llm.num_live)
        drained = asyncio.ensure_future(self._llm.drain(self._grace))
        while not (drained.done() or self.force_exit):  # a second signal forces the exit
            await asyncio.wait([drained], timeout=0.1)
        await super().shutdown(sockets)
        if drained.done():
            logger.info("shut down, %d requests cut off", drained.result())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's raises the signal again at the end; here a clean end is exit status 0."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self.handle_exit(number, frame)

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(model: str, options: EngineOptions, config: ServerConfig, *, async_config: AsyncConfig | None = None) -> None:
    """Load a model and serve it until SIGTERM or Ctrl-C. Raises ValueError for anything a user can get wrong."""
    from aspire.llm import LLM

    listener = listen(config)  # before the model loads: a port in use is told at once
    try:
        engine = LLM(model, show_progress=True, **options).engine
        if not config.default_sampling:
            config = replace(config, default_sampling=model_defaults(engine.default_params))
        run(engine, config, async_config=async_config, listener=listener)
    finally:
        listener.close()


def model_defaults(params: SamplingParams) -> dict[str, object]:
    """Where the model's own generation defaults differ from neutral ones; requests that say nothing get these."""
    neutral = SamplingParams()
    return {name: getattr(params, name) for name in OPTIONAL_FIELDS if getattr(params, name) != getattr(neutral, name)}


def run(engine: EngineLike, config: ServerConfig, *, async_config: AsyncConfig | None = None,
        listener: socket.socket | None = None) -> None:
    """Serve an engine until SIGTERM or Ctrl-C."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    settle_garbage_collector()
    llm = AsyncLLM(engine, async_config)
    listener = listener or listen(config)
    server = make_server(llm, config)
    host, port = listener.getsockname()[:2]
    logger.info("serving %s at http://%s:%d", ", ".join(config.served_model_names or (llm.model_name,)), host, port)
    server.run(sockets=[listener])
    _leave_unfinished_work()


def _leave_unfinished_work() -> None:
    """End the process here if a thread of ours still computes: a step of a large model or a grammar's compilation may
    take many seconds more, the interpreter would wait for it or be torn down under it, and nobody wants the result."""
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("aspire-")]:
        thread.join(IDLE_THREAD_SECONDS)
        if thread.is_alive():
            logger.warning("leaving the work of thread %s unfinished", thread.name)
            logging.shutdown()
            os._exit(0)


def settle_garbage_collector() -> None:
    """What is alive now (modules, the model, tables) lives as long as the process: never look at it again. A full
    collection over it would stop all streams for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


def make_server(llm: AsyncLLM, config: ServerConfig) -> DrainingServer:
    """The server object, for those who run the event loop themselves (tests do)."""
    return DrainingServer(uvicorn.Config(
        create_app(llm, config), log_config=None, access_log=False, lifespan="off", server_header=False,
        proxy_headers=False, timeout_keep_alive=30, timeout_graceful_shutdown=LAST_WORDS_SECONDS),
        llm, config.shutdown_grace)


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ValueError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"host and port must be free to listen on, got {config.host}:{config.port} ({error})"
                         ) from error
    # Inherited by connections. asyncio sets it only on sockets made with an explicit protocol, which this one is not;
    # without it every small event waits for the client's delayed acknowledgement, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Inherited by connections: the kernel drops a peer that takes nothing for so long, even while we shut down.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT,
                            int(min(config.write_timeout * 1000, LONGEST_MILLISECONDS)))
    return listener
