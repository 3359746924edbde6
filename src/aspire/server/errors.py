"""Errors as OpenAI shapes them: {"error": {"message", "type", "param", "code"}}. Never a traceback."""

import re
from collections.abc import Mapping

from starlette.responses import JSONResponse

from aspire.async_engine import DrainingError, EngineDeadError, QueueFullError


class ApiError(Exception):
    """An error to show to the client. param: the request field at fault."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def renamed(self, name: str) -> "ApiError":
        """The same about a field that the client knows by another name."""
        old, message = self.param or "", self.message
        if old and name != old and message.startswith(old):
            rest = message[len(old):]
            # structured_outputs.regex was sent as guided_regex: then there is no part of it to name.
            message = name + (rest if name.endswith(old) else re.sub(r"^\.\w+", "", rest))
        return ApiError(self.status, message, param=name, code=self.code, headers=self.headers)

    def body(self) -> dict[str, object]:
        return error_body(self.status, self.message, param=self.param, code=self.code)

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, object]:
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 408: "timeout_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError | None:
    """What a failure of the engine edge means to a client; None for anything unforeseen."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, f"server busy: {error}", code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, DrainingError):
        return ApiError(503, str(error), code="draining", headers={"Retry-After": "10", "Connection": "close"})
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error), code="engine_dead")
    if isinstance(error, TimeoutError):
        return ApiError(408, str(error) or "the request took too long", code="timeout")
    if isinstance(error, ValueError):
        return bad_request(str(error), field_at_fault(str(error)))
    return None


def field_at_fault(message: str) -> str | None:
    """Our ValueErrors begin with the field's name."""
    first = message.split(" ", 1)[0].split(".", 1)[0]
    return first if first.replace("_", "").isalnum() and first.islower() else None
