"""What ends a handler's work early: a deadline, a client that left, a client that takes nothing."""

import asyncio
from types import TracebackType
from typing import Any

from starlette.types import Message, Receive, Send

WATCH_AFTER = 0.002  # seconds: meanwhile the request is on its way to the engine, and every microsecond delays it


class ClientLeftError(Exception):
    """The client closed the connection before its answer was complete."""


class ClientStuckError(Exception):
    """The client keeps the connection but does not read."""


class Cutoff:
    """`cut(error)` ends the work inside the `with` block: its task is cancelled, cleans up, and raises `error`.

    No task of its own and no second one for the work: this is on the path of every request.
    """

    __slots__ = ("_error", "_task")

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> "Cutoff":
        self._task = asyncio.current_task()
        return self

    def cut(self, error: Exception) -> None:
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self._error is None or (error is not None and not isinstance(error, asyncio.CancelledError)):
            return
        if task is not None and hasattr(task, "uncancel"):  # from Python 3.11 on
            task.uncancel()
        raise self._error from None


class ClientWatch(Cutoff):
    """A cutoff for clients that leave, and for those that take nothing of what `send` sends for `write_timeout`
    seconds. The request's body must have been read."""

    __slots__ = ("_begin", "_blocked_since", "_receive", "_timer", "_watching", "_write_timeout")

    def __init__(self, receive: Receive, write_timeout: float | None = None) -> None:
        super().__init__()
        self._receive = receive
        self._write_timeout = write_timeout
        self._blocked_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None

    def __enter__(self) -> "ClientWatch":
        super().__enter__()
        self._begin = asyncio.get_running_loop().call_later(WATCH_AFTER, self._watch)
        return self

    async def send(self, send: Send, message: Message) -> None:
        """Send a part of the answer, under the eye of the timer."""
        self._blocked_since = asyncio.get_running_loop().time()
        await send(message)
        self._blocked_since = None

    def stop(self) -> None:
        """The answer is complete: from now on the client may do as it likes."""
        self._begin.cancel()
        if self._watching is not None:
            self._watching.remove_done_callback(self._on_left)
            self._watching.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()
        super().__exit__(kind, error, trace)

    def _watch(self) -> None:
        self._watching = asyncio.ensure_future(_until_disconnect(self._receive))
        self._watching.add_done_callback(self._on_left)
        if self._write_timeout is not None:
            self._look_again(self._write_timeout)

    def _on_left(self, watching: "asyncio.Task[None]") -> None:
        if not watching.cancelled():
            watching.exception()  # a failing `receive` means the same, and asyncio wants it looked at
            self.cut(ClientLeftError())

    def _look_again(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        assert self._write_timeout is not None
        since = self._blocked_since
        blocked = 0.0 if since is None else asyncio.get_running_loop().time() - since
        if blocked >= self._write_timeout:
            self.cut(ClientStuckError(f"the client took nothing for {self._write_timeout:g} s"))
        else:
            self._look_again(self._write_timeout - blocked)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
