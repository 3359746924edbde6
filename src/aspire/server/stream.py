"""A job's outputs as server-sent events: the one loop that all streaming routes share."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from aspire.request import RequestOutput
from aspire.server.service import Job, Service, merged
from aspire.server.sse import DONE, EventStream, Last


class Writer(Protocol):
    """How a route shows outputs; made per request. Each answer is any number of events, b"" for none."""

    def begin(self) -> bytes: ...

    def write(self, index: int, output: RequestOutput) -> bytes:
        """What is new in the output of prompt `index`."""
        ...

    def end(self) -> bytes: ...


def stream_job(service: Service, starting: Coroutine[Any, Any, Job], make: Callable[[], Writer]) -> EventStream[Job]:
    """`make` is called once the engine has the request, which it works on meanwhile."""
    return EventStream(starting, partial(_events, make), service.finish, write_timeout=service.config.write_timeout)


async def _events(make: Callable[[], Writer], job: Job) -> AsyncGenerator[bytes, None]:
    writer = make()
    first = writer.begin()
    if first:
        yield first
    positions = {stream.request_id: i for i, stream in enumerate(job.streams)}
    num_left = len(positions)
    outputs: AsyncIterator[RequestOutput] = job.streams[0] if num_left == 1 else merged(job.streams)
    async for output in outputs:
        data = writer.write(positions[output.request_id], output)
        num_left -= output.finished
        if num_left == 0:
            yield Last(data + writer.end() + DONE)  # in one piece: the end of an answer is what the client waits for
            return
        if data:
            yield data
