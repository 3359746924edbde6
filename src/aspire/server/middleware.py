"""The guard before every route (key, content type, size) and the log line after it. Plain ASGI: streams pass."""

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aspire.server.config import ServerConfig
from aspire.server.errors import ApiError
from aspire.server.watch import ClientLeftError, ClientStuckError, Cutoff

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
OPEN_PATHS = ("/health", "/ready", "/version", "/metrics", "/dashboard", "/dashboard/static/")

RawHeaders = Mapping[bytes, bytes]  # of headers given twice, the last one

logger = logging.getLogger("aspire.server")


class AccessLog:
    """Outermost: gives each request an id, logs one line for it, turns what nobody foresaw into a plain 500."""

    def __init__(self, app: ASGIApp, on_response: Callable[[str, int], None] = lambda path, status: None) -> None:
        self._app = app
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = scope["aspire.request_id"] = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        begun, status, note = time.monotonic(), 0, ""

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientLeftError:
            status, note = status or 499, " client left"
        except ClientStuckError as error:
            note = f" {error}"
        except Exception:
            logger.exception("request_id=%s failed", request_id)
            if status == 0:
                await ApiError(500, "internal error", code="internal_error").response()(scope, receive, send_with_id)
            else:
                note = " broken off"
        finally:
            # A path that no route takes is "other", so that the metrics stay bounded.
            self._on_response(getattr(scope.get("route"), "path", "other"), status)
            # Later: the answer's last bytes leave when this turn of the event loop ends.
            asyncio.get_running_loop().call_soon(
                logger.info, "%s %s %d %.1fms request_id=%s%s", scope["method"], scope["path"], status,
                (time.monotonic() - begun) * 1e3, request_id, note)


class Guard:
    """Checks the key, then the content type, then reads the body up to the limit. Refuses before any route runs.

    Routes find the body in the scope, as "aspire.body"."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = [key.encode() for key in config.api_keys]
        self._max_body = config.max_body_bytes
        self._read_timeout = config.read_timeout
        self._log_prompts = config.log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            self._check_key(scope, headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                scope["aspire.body"] = await self._read_in_time(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_key(self, scope: Scope, headers: RawHeaders) -> None:
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_PATHS[-1]) or scope["method"] == "OPTIONS":
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else b""
        # Every key is compared, each in constant time: the answer's timing tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if not any(matches):
            raise ApiError(401, "a valid API key must be given as \"Authorization: Bearer KEY\"",
                           code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _read_in_time(self, headers: RawHeaders, receive: Receive) -> bytes:
        with Cutoff() as cutoff:
            timer = asyncio.get_running_loop().call_later(self._read_timeout, cutoff.cut, ApiError(
                408, f"the body did not arrive within {self._read_timeout:g} s", code="body_too_slow",
                headers={"Connection": "close"}))
            try:
                return await self._read(headers, receive)
            finally:
                timer.cancel()

    async def _read(self, headers: RawHeaders, receive: Receive) -> bytes:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # also keeps web pages of other origins from posting without CORS
            raise ApiError(415, f"content type must be application/json, got {kind.decode('latin-1')!r}",
                           code="unsupported_media_type")
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding != b"identity":  # unpacking would get around the limit on a body's size
            raise ApiError(415, f"content encoding must be identity, got {encoding.decode('latin-1')!r}",
                           code="unsupported_media_type")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:18]) > self._max_body:
            raise self._too_large()
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            body += message.get("body", b"")
            if len(body) > self._max_body:
                raise self._too_large()
            if not message.get("more_body", False):
                break
        if SURROGATE.search(body) and _has_surrogates(bytes(body)):
            raise ApiError(400, "strings must be valid Unicode, got a lone surrogate", code="invalid_unicode")
        if self._log_prompts:
            logger.info("body %s", bytes(body).decode(errors="replace"))
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body must have at most {self._max_body} bytes", code="body_too_large",
                        headers={"Connection": "close"})


def _has_surrogates(body: bytes) -> bool:
    """Escaped surrogates in pairs are one character; alone they can be neither tokenized nor sent back."""
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
    except (ValueError, RecursionError):
        return False  # not JSON: the route says so
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
