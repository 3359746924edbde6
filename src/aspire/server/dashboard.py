"""GET /dashboard: a live page over the engine's snapshots. Static files of this package and one event stream."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from pathlib import Path

from starlette.responses import FileResponse, Response

from aspire.server.errors import ApiError, bad_request
from aspire.server.service import Service
from aspire.server.sse import EventStream, event

STATIC = Path(__file__).parent / "static"
FILES = {"app.js": "text/javascript", "style.css": "text/css", "charts.js": "text/javascript"}
SHOWN_REQUESTS = 100
MAX_WATCHERS = 32
# Nothing from elsewhere runs or loads, and no other page may frame this one.
HEADERS = {"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                                      "img-src 'self' data:; base-uri 'none'; form-action 'none'; "
                                      "frame-ancestors 'none'",
           "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}


def page() -> Response:
    return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8", headers=HEADERS)


def static_file(name: str) -> Response:
    """Only the names above: nothing else of the disk can be asked for."""
    if name not in FILES:
        raise ApiError(404, f"no such file: {name!r}")
    return FileResponse(STATIC / name, media_type=FILES[name], headers=HEADERS)


class Watchers:
    """The pages that watch right now, a bounded number."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._count = 0

    def stream(self, interval: float) -> EventStream[float]:
        """Snapshots every `interval` seconds. Raises ApiError for a wrong interval or too many watchers."""
        if not 0.05 <= interval <= 2:
            raise bad_request(f"interval must be in [0.05, 2], got {interval}", "interval")
        if self._count >= MAX_WATCHERS:
            raise ApiError(429, f"at most {MAX_WATCHERS} pages may watch", headers={"Retry-After": "10"})
        return EventStream(self._enter(interval), self._events, self._leave, tail=b"",
                           write_timeout=self._service.config.write_timeout)

    async def _enter(self, interval: float) -> float:
        self._count += 1
        return interval

    def _leave(self, interval: float) -> None:
        self._count -= 1

    async def _events(self, interval: float) -> AsyncGenerator[bytes, None]:
        llm = self._service.llm
        while llm.accepting:
            yield event(snapshot(self._service))
            await asyncio.sleep(interval)
        yield event(snapshot(self._service))


def snapshot(service: Service) -> dict[str, object]:
    """EngineStats as the page reads it: its fields, the time, and how the server is."""
    stats = service.llm.stats
    state = "failed" if service.llm.failure is not None else "draining" if not service.llm.accepting else "ready"
    return {**asdict(stats), "requests": [asdict(view) for view in stats.requests[:SHOWN_REQUESTS]],
            "kv_usage": stats.kv_usage, "time": time.time(), "model": service.model_names[0], "state": state,
            "num_requests": len(stats.requests)}
