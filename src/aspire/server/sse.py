"""Server-sent events: how they are written, and the response that sends them as they come."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from starlette.types import Receive, Scope, Send

from aspire.server.errors import as_api_error
from aspire.server.watch import ClientLeftError, ClientWatch

Source = TypeVar("Source")

DONE = b"data: [DONE]\n\n"
HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no"))
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)


def event(data: Mapping[str, object]) -> bytes:
    return b"data: %b\n\n" % _ENCODER.encode(data).encode()


class Last(bytes):
    """The events that end a stream, its tail included: nothing is asked of the source after them."""


class Chunks:
    """The events of one answer. The fields that all of them share are encoded once."""

    __slots__ = ("_head",)

    def __init__(self, head: Mapping[str, object]) -> None:
        self._head = b'data: %b,"choices":' % _ENCODER.encode(head)[:-1].encode()

    def event(self, choices: Sequence[Mapping[str, object]], more: Mapping[str, object] | None = None) -> bytes:
        end = b"}" if not more else b",%b" % _ENCODER.encode(more)[1:].encode()
        return b"%b%b%b\n\n" % (self._head, _ENCODER.encode(choices).encode(), end)


class EventStream(Generic[Source]):
    """An ASGI response. Awaits `begin`, whose errors it raises before it sends anything, then sends `events` as they
    come.

    A later error becomes an event of its own; `tail` ends every stream whose source did not with `Last`. `finish` is
    called whatever happens after `begin`: it is what aborts the request of a client that leaves or takes nothing for
    `write_timeout` seconds.
    """

    __slots__ = ("_begin", "_events", "_finish", "_tail", "_write_timeout")

    def __init__(self, begin: Awaitable[Source], events: Callable[[Source], AsyncGenerator[bytes, None]],
                 finish: Callable[[Source], None], *, write_timeout: float, tail: bytes = DONE) -> None:
        self._begin = begin
        self._events = events
        self._finish = finish
        self._tail = tail
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ClientWatch(receive, self._write_timeout) as watch:
            source = await self._begin
            events = self._events(source)
            try:
                await self._send(watch, send, events)
            except OSError as error:
                raise ClientLeftError from error
            finally:
                self._finish(source)
                await events.aclose()

    async def _send(self, watch: ClientWatch, send: Send, events: AsyncGenerator[bytes, None]) -> None:
        await watch.send(send, {"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        last = self._tail
        try:
            async for data in events:
                if isinstance(data, Last):
                    last = data
                    break
                await watch.send(send, {"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            known = as_api_error(error)
            if known is None:
                raise
            last = event(known.body()) + self._tail
        await watch.send(send, {"type": "http.response.body", "body": last, "more_body": False})
        watch.stop()
        await asyncio.sleep(0)  # the last bytes leave when this turn of the event loop ends: tidy up after them
