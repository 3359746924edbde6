"""EventStream against scripted ASGI peers: clients that block, leave, or never let it begin."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from aspire.server.sse import EventStream
from aspire.server.watch import ClientLeftError, ClientStuckError


class Peer:
    """An ASGI connection: `block_at` send calls pass, then one hangs; the client leaves after `leave` seconds."""

    def __init__(self, block_at: int = 1000, leave: float = 1000.0, error_at: int = 1000) -> None:
        self.sent: list[dict[str, Any]] = []
        self._block_at, self._leave, self._error_at = block_at, leave, error_at

    async def send(self, message: Any) -> None:
        if len(self.sent) == self._error_at:
            raise OSError("gone")
        if len(self.sent) == self._block_at:
            await asyncio.sleep(1000)
        self.sent.append(message)

    async def receive(self) -> Any:
        await asyncio.sleep(self._leave)
        return {"type": "http.disconnect"}


def respond(peer: Peer, write_timeout: float = 0.1) -> list[str]:
    """Run a response of five events; what happened to its source."""
    log: list[str] = []

    async def begin() -> str:
        await asyncio.sleep(0.001)
        return "job"

    async def events(source: str) -> AsyncGenerator[bytes, None]:
        assert source == "job"
        try:
            for i in range(5):
                await asyncio.sleep(0.01)
                yield b"data: %d\n\n" % i
            log.append("ended")
        finally:
            log.append("source closed")

    async def run() -> None:
        response = EventStream(begin(), events, lambda job: log.append(f"{job} finished"), write_timeout=write_timeout)
        await asyncio.wait_for(response({"type": "http"}, peer.receive, peer.send), 5)
    try:
        asyncio.run(run())
    except (ClientLeftError, ClientStuckError) as error:
        log.append(type(error).__name__)
    return log


def test_to_the_end() -> None:
    peer = Peer()
    assert respond(peer) == ["ended", "source closed", "job finished"]
    assert b"".join(message.get("body", b"") for message in peer.sent) == (
        b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: 3\n\ndata: 4\n\ndata: [DONE]\n\n")
    assert peer.sent[-1]["more_body"] is False


def test_a_client_that_does_not_read() -> None:
    """Planted fault: no watch on a blocked send."""
    assert respond(Peer(block_at=3)) == ["job finished", "source closed", "ClientStuckError"]


def test_waiting_for_the_engine_is_not_blocking() -> None:
    """Only a blocked send counts, not a slow source. Planted fault: measuring since the last send."""
    assert respond(Peer(), write_timeout=0.02)[0] == "ended"


@pytest.mark.parametrize("peer", [Peer(leave=0.025), Peer(error_at=2)], ids=["disconnect", "failed send"])
def test_a_client_that_leaves(peer: Peer) -> None:
    assert sorted(respond(peer)) == ["ClientLeftError", "job finished", "source closed"]


def test_a_stream_that_never_began_is_closed_too() -> None:
    """A generator that never started runs no finally. Planted fault: relying on the generator's own finally."""
    assert respond(Peer(error_at=0)) == ["job finished", "ClientLeftError"]
