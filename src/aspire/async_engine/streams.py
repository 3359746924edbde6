"""OutputStream and Mailbox: how outputs cross from the stepping thread to event loops, bounded by construction."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from aspire.request import CompletionOutput, RequestOutput


class OutputStream:
    """One request's outputs, newest only. `async for` yields cumulative outputs and ends after the finished one.

    Call `close` in a finally: it aborts a request that still runs.
    """

    __slots__ = (
        "_error",
        "_over",
        "_timeout",
        "_timer",
        "_unread",
        "_waiter",
        "accepted",
        "first_token_time",
        "last_time",
        "latest",
        "loop",
        "num_outputs",
        "on_close",
        "request_id",
        "start_time",
    )

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, num_outputs: int) -> None:
        self.request_id = request_id
        self.loop = loop
        self.accepted: asyncio.Future[None] = loop.create_future()
        self.on_close: Callable[[], None] = lambda: None
        # Written by the stepping thread.
        self.start_time = self.last_time = time.monotonic()
        self.first_token_time: float | None = None
        self.latest: RequestOutput | None = None
        # Touched by the event loop's thread only.
        self.num_outputs = num_outputs
        self._unread: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the one consumer, while it waits
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._timeout = 0.0

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while self._unread is None and self._error is None and not self._over:
            self._waiter = self.loop.create_future()
            await self._waiter
        if self._unread is not None:
            output, self._unread = self._unread, None
            return output
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def final(self) -> RequestOutput:
        """Wait for the end and return the whole output."""
        last: RequestOutput | None = None
        async for output in self:
            last = output
        assert last is not None, "a stream ends with its finished output"
        return last

    def receive(self, item: RequestOutput | Exception | None) -> None:
        """Take what the engine sent: an output, a failure, or None for "accepted". On the loop's thread."""
        if self._over:
            return
        if isinstance(item, Exception):
            self._finish(item)
        elif item is not None:
            self._unread = item
            if item.finished:
                self._finish(None)
        if not self.accepted.done():
            if isinstance(item, Exception):
                self.accepted.set_exception(item)
            else:
                self.accepted.set_result(None)
        self._wake()

    def expire_after(self, seconds: float) -> None:
        """Fail with TimeoutError and abort the request unless it ends within that time."""
        if not self._over:
            self._timeout = seconds
            self._timer = self.loop.call_later(seconds, self._expire)

    def close(self) -> None:
        """Stop caring; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._over = True
        self._wake()
        self.on_close()

    def update(self, new: RequestOutput) -> RequestOutput:
        """Take the engine's newest output; an output of the n that is absent from it stays as it was. On the stepping
        thread."""
        old = self.latest
        if old is not None and len(new.outputs) < self.num_outputs:
            parts = {part.index: part for part in (*old.outputs, *new.outputs)}
            new = replace(new, outputs=tuple(parts[index] for index in sorted(parts)),
                          prompt_logprobs=new.prompt_logprobs or old.prompt_logprobs)
        self.latest = new
        return new

    def cut(self) -> RequestOutput:
        """The last output seen, closed with finish_reason "abort"."""
        last = self.latest or RequestOutput(self.request_id, None, ())
        parts = {index: CompletionOutput(index, "", ()) for index in range(self.num_outputs)}
        parts.update({part.index: part for part in last.outputs})
        return replace(last, finished=True, outputs=tuple(
            part if part.finish_reason else replace(part, finish_reason="abort") for part in parts.values()))

    def _finish(self, error: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._error = error
        self._over = True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        if not self._over:
            self._finish(TimeoutError(f"the request did not finish within {self._timeout:g} seconds"))
            self.on_close()
            self._wake()


class Mailbox:
    """Items for the streams of one event loop. At most one wake-up and one output per stream are ever pending."""

    __slots__ = ("_items", "_lock", "_scheduled", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._items: dict[OutputStream, RequestOutput | Exception | None] = {}
        self._scheduled = False

    def put(self, stream: OutputStream, item: RequestOutput | Exception | None) -> None:
        """Outputs are cumulative: a newer item replaces an older one, unless that ends the stream."""
        with self._lock:
            if not _ends(self._items.get(stream)):
                self._items[stream] = item

    def flush(self) -> bool:
        """Have the loop pick its items up. False: the loop is closed."""
        with self._lock:
            if not self._items or self._scheduled:
                return True
            self._scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            return False
        return True

    def _deliver(self) -> None:
        with self._lock:
            items, self._items = self._items, {}
            self._scheduled = False
        for stream, item in items.items():
            stream.receive(item)


def _ends(item: RequestOutput | Exception | None) -> bool:
    return isinstance(item, Exception) or (item is not None and item.finished)
