"""Server-sent events, and what it takes to notice that a client left or stopped reading."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)


class ClientLeftError(Exception):
    """The client closed the connection before its answer was complete."""


class ClientStuckError(Exception):
    """The client keeps the connection but does not read."""


def event(data: Mapping[str, object]) -> bytes:
    return b"data: " + _ENCODER.encode(data).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come. `close` is called when they end, when the client leaves, or when it takes nothing for
    `write_timeout` seconds: closing is what aborts the request behind them."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None], *,
                 write_timeout: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
                         media_type=self.media_type)
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._blocked_since: float | None = None
        self._complete = False
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(_until_disconnect(receive))
        try:
            while not (pump.done() or watch.done()):
                await asyncio.wait((pump, watch), timeout=self._write_timeout / 4,
                                   return_when=asyncio.FIRST_COMPLETED)
                if self._blocked_since is not None and _now() - self._blocked_since > self._write_timeout:
                    raise ClientStuckError(f"the client took nothing for {self._write_timeout:g} s")
            if pump.done():
                pump.result()
        except OSError as error:
            raise ClientLeftError from error
        finally:
            await _cancelled(pump)
            await _cancelled(watch)
            self._close()  # a generator that never started runs no finally of its own
        if not self._complete:
            raise ClientLeftError

    async def _pump(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._events:
                self._blocked_since = _now()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._blocked_since = None
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            self._complete = True
        finally:
            await self._events.aclose()


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; cancels it and raises ClientLeftError when the client disconnects first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_disconnect(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        await _cancelled(task)
        await _cancelled(watch)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    """Cancel and wait until the task's own clean-up is over."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
