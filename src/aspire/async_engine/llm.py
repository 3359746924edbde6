"""AsyncLLM: one thread steps the engine, every request is an async stream. Knows nothing of HTTP.

Outputs are cumulative, so a stream keeps only the newest one: a consumer that never reads holds one value, not a queue.
"""

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence

from typing_extensions import Unpack

from aspire.async_engine.helpers import Helpers
from aspire.async_engine.latency import Latency
from aspire.async_engine.protocol import AsyncConfig, DrainingError, EngineDeadError, EngineLike, QueueFullError
from aspire.async_engine.streams import Mailbox, OutputStream
from aspire.config import EngineOptions
from aspire.request import RequestOutput, SamplingParams

CLOSE_SECONDS = 10.0
SETTLE_SECONDS = 0.001  # of idleness before the books are looked at: until then event loops send the ends of answers
LAST_STEP_SECONDS = 1.0  # after a drain: a step of which nobody will see the result may be left to the process's end


class AsyncLLM:
    """The engine behind asyncio. Streams may be consumed from any event loop, several loops at once included."""

    def __init__(self, engine: EngineLike, config: AsyncConfig | None = None) -> None:
        self.config = config or AsyncConfig()
        self.tokenizer = engine.tokenizer
        self.model_name = engine.model_name
        self.max_model_len = engine.max_model_len
        self.latency = Latency()
        self.stats = engine.stats()
        self._engine = engine
        self._wake = threading.Condition()  # guards the five below
        self._commands: list[Callable[[], None]] = []
        self._streams: dict[str, OutputStream] = {}
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._stopping = False
        self._failure: Exception | None = None
        self._draining = False
        self._stats_time = 0.0
        self._helpers = Helpers()
        self._thread = threading.Thread(target=self._run, name="aspire-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_model(cls, model: str, config: AsyncConfig | None = None, **options: Unpack[EngineOptions]) -> "AsyncLLM":
        """Load a model, with the options of `LLM`. Raises ValueError for anything a user can get wrong."""
        from aspire.llm import LLM

        return cls(LLM(model, **options).engine, config)

    # -- for users, on their event loop ---------------------------------------------------------------------------

    @property
    def failure(self) -> Exception | None:
        """Why the engine is dead; None while it lives."""
        return self._failure

    @property
    def accepting(self) -> bool:
        return self._failure is None and not self._draining

    @property
    def num_live(self) -> int:
        return len(self._streams)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; long texts are tokenized on a helper thread so that streams keep flowing."""
        return await self._helpers.encode(self.tokenizer, text, add_special_tokens)

    async def submit(self, prompt: str | Sequence[int], params: SamplingParams, *, request_id: str | None = None,
                     priority: int = 0, timeout: float | None = None, text: str | None = None) -> OutputStream:
        """Hand a request to the engine and return its stream once it is accepted.

        prompt: text, or token ids (`text` is then what outputs show as their prompt). timeout: seconds until the
        stream fails with TimeoutError. Raises ValueError for a request that cannot be served, QueueFullError,
        DrainingError, EngineDeadError.
        """
        self._refuse_unless_open()
        if params.n > self.config.max_live:
            raise ValueError(f"n must be at most {self.config.max_live}, the limit of live outputs, got {params.n}")
        if isinstance(prompt, str):
            text, prompt = prompt, await self.encode(prompt)
        if params.structured_outputs is not None:
            await self._helpers.prepare(self._engine, params)
        stream = OutputStream(request_id or uuid.uuid4().hex, asyncio.get_running_loop(), params.n)
        token_ids = tuple(prompt)

        def admit() -> None:
            self._engine.add(stream.request_id, token_ids, params, prompt=text, priority=priority)

        with self._wake:
            self._refuse_unless_open()
            num_live = sum(live.num_outputs for live in self._streams.values())
            if num_live + params.n > self.config.max_live:
                raise QueueFullError(f"{num_live} outputs are running or waiting, the limit is {self.config.max_live}")
            if stream.request_id in self._streams:
                raise ValueError(f"request_id must be unique among live requests, got {stream.request_id!r}")
            self._streams[stream.request_id] = stream
            self._mailboxes.setdefault(stream.loop, Mailbox(stream.loop))
            self._commands.append(lambda: self._admit(stream, admit))
            self._wake.notify()
        stream.on_close = lambda: self._forget(stream)
        try:
            await stream.accepted
        except BaseException:
            stream.close()
            raise
        if timeout is not None:
            stream.expire_after(timeout)
        return stream

    async def generate(self, prompt: str | Sequence[int], params: SamplingParams, *, request_id: str | None = None,
                       priority: int = 0) -> AsyncIterator[RequestOutput]:
        """Cumulative outputs until the request finishes. Leaving the loop early aborts the request."""
        stream = await self.submit(prompt, params, request_id=request_id, priority=priority)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def abort(self, request_id: str) -> bool:
        """End a request now; its stream yields one last output with finish_reason "abort". False: no such request."""
        with self._wake:
            stream = self._streams.get(request_id)
            if stream is None:
                return False
            self._commands.append(lambda: self._abort(stream))
            self._wake.notify()
        return True

    async def drain(self, timeout: float) -> int:
        """Accept nothing more, wait up to `timeout` seconds for live requests, cut the rest off, stop the thread.

        Returns how many requests were cut off. That happens at once, however long the engine's current step takes.
        """
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._streams and self._failure is None and time.monotonic() < deadline:
            await asyncio.sleep(min(0.02, timeout))
        with self._wake:
            left, self._streams = list(self._streams.values()), {}
            self._commands += [lambda stream=stream: self._drop(stream) for stream in left]  # type: ignore[misc]
        for stream in left:
            self._post(stream, stream.cut())
        await asyncio.get_running_loop().run_in_executor(None, self.close, LAST_STEP_SECONDS)
        return len(left)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Abort what runs and stop the thread, waiting some seconds for its current step. Safe to call twice."""
        self._draining = True
        with self._wake:
            streams = list(self._streams.values())
        for stream in streams:
            self.abort(stream.request_id)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        self._helpers.close()

    def _refuse_unless_open(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine failed: {self._failure!r}") from self._failure
        if self._draining:
            raise DrainingError("the server is shutting down")

    def _forget(self, stream: OutputStream) -> None:
        """The consumer left: abort unless the request is already over."""
        with self._wake:
            if self._streams.get(stream.request_id) is not stream:
                return
            del self._streams[stream.request_id]
            self._commands.append(lambda: self._engine.abort(stream.request_id))
            self._wake.notify()

    # -- the stepping thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_unfinished:
                    self._publish(self._engine.step())
        except Exception as error:
            self._fail(error)

    def _obey(self) -> bool:
        """Carry out what users asked for since the last step; sleep while there is nothing to do. False: stop."""
        self._drop_closed_loops()
        if self._engine.has_unfinished:
            self._refresh_stats(False)
        elif not self._wait(SETTLE_SECONDS):
            self._refresh_stats(True)
            self._wait(None)
        with self._wake:
            commands, self._commands = self._commands, []
            stopping = self._stopping
        for command in commands:
            command()
        if stopping:
            self._refresh_stats(True)
        return not stopping

    def _wait(self, seconds: float | None) -> bool:
        """Until there is something to do, which it returns, or the time is over."""
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._commands) or self._stopping, seconds)

    def _refresh_stats(self, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._stats_time >= self.config.stats_interval:
            self.stats, self._stats_time = self._engine.stats(), now

    def _drop_closed_loops(self) -> None:
        for mailbox in list(self._mailboxes.values()):
            if mailbox.loop.is_closed():
                self._drop_loop(mailbox)

    def _admit(self, stream: OutputStream, admit: Callable[[], None]) -> None:
        if self._streams.get(stream.request_id) is not stream:
            return  # its consumer left before the engine saw it
        try:
            admit()
        except ValueError as error:
            self._end(stream)
            self._post(stream, error)
        else:
            self._post(stream, None)

    def _abort(self, stream: OutputStream) -> None:
        if self._streams.get(stream.request_id) is not stream:
            return  # over already
        self._end(stream)
        self._drop(stream)
        self._post(stream, stream.cut())

    def _drop(self, stream: OutputStream) -> None:
        self._engine.abort(stream.request_id)
        self.latency.count_finished("abort")

    def _publish(self, outputs: list[RequestOutput]) -> None:
        now = time.monotonic()
        posted: list[tuple[OutputStream, RequestOutput]] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted; the engine hears of it before the next step
            output = stream.update(output)
            if output.finished:
                self._end(stream)
            self._put(stream, output)
            posted.append((stream, output))
        for mailbox in list(self._mailboxes.values()):
            if not mailbox.flush():
                self._drop_loop(mailbox)
        for stream, output in posted:  # while the event loops wake up
            self.latency.record(stream, output, now)

    def _post(self, stream: OutputStream, item: RequestOutput | Exception | None) -> None:
        mailbox = self._put(stream, item)
        if mailbox is not None:
            mailbox.flush()

    def _put(self, stream: OutputStream, item: RequestOutput | Exception | None) -> Mailbox | None:
        mailbox = self._mailboxes.get(stream.loop)
        if mailbox is not None:  # else its event loop was closed
            mailbox.put(stream, item)
        return mailbox

    def _end(self, stream: OutputStream) -> None:
        with self._wake:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]

    def _drop_loop(self, mailbox: Mailbox) -> None:
        """The event loop was closed under its streams: nobody can read them any more."""
        with self._wake:
            lost = [stream for stream in self._streams.values() if stream.loop is mailbox.loop]
            for stream in lost:
                del self._streams[stream.request_id]
            del self._mailboxes[mailbox.loop]
        for stream in lost:
            self._engine.abort(stream.request_id)

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._failure = error
            streams, self._streams = list(self._streams.values()), {}
            self._commands = []
        for stream in streams:
            dead = EngineDeadError(f"the engine failed: {error!r}")
            dead.__cause__ = error
            self._post(stream, dead)
