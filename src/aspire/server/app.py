"""create_app: the routes, the guard before them and the error shapes. Knows AsyncLLM, never the engine class."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import aspire
from aspire.async_engine import AsyncLLM, DrainingError, EngineDeadError, QueueFullError
from aspire.server import chat, completions, dashboard, misc, openapi
from aspire.server import generate as generate_route
from aspire.server.config import ServerConfig
from aspire.server.errors import ApiError, as_api_error, bad_request
from aspire.server.metrics import Metrics
from aspire.server.middleware import AccessLog, Guard
from aspire.server.openapi import Operation
from aspire.server.protocol import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from aspire.server.service import Service
from aspire.server.validation import Checked, read_body

Handler = Callable[[Request], Awaitable[ASGIApp]]


class JsonEndpoint(Generic[Checked]):
    """An ASGI endpoint: checks the JSON body, calls `handler`, and shows foreseen errors."""

    def __init__(self, kind: type[Checked], handler: Callable[[Checked, Request], Awaitable[ASGIApp]]) -> None:
        self._kind = kind
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: Checked | None = None
        try:
            body = read_body(scope["aspire.body"], self._kind)
            response = await self._handler(body, Request(scope, receive, send))
            await response(scope, receive, send)
        except Exception as error:
            known = as_api_error(error)
            if known is None:
                raise
            if body is not None and known.param is not None:
                known = known.renamed(body.sent_as(known.param))
            await known.response()(scope, receive, send)


class App:
    """The server as an ASGI application. A POST to a known path goes straight to its endpoint; Starlette's router and
    error handling, through which every event of a stream would pass, see the rest."""

    def __init__(self, service: Service, metrics: Metrics, config: ServerConfig) -> None:
        self.service = service
        described = _describe(service, metrics)
        routes: list[Route] = [NamedRoute(operation.path, endpoint, methods=[operation.method])
                               for operation, endpoint in described]
        document = openapi.document([operation for operation, _ in described], aspire.__version__)
        routes.append(_get("/openapi.json", lambda request: JSONResponse(document)))
        routes += _dashboard_routes(service) if config.dashboard else []
        self._posts = {route.path: route for route in routes if "POST" in (route.methods or ())}
        self._others = Starlette(routes=routes, exception_handlers=_error_handlers())
        inner: ASGIApp = Guard(self._dispatch, config)
        if config.allowed_origins:
            inner = CORSMiddleware(inner, allow_origins=list(config.allowed_origins), allow_methods=["GET", "POST"],
                                   allow_headers=["Authorization", "Content-Type", "X-Request-Id"])
        self._outer = AccessLog(inner, metrics.count_response)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outer(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._posts.get(scope["path"]) if scope["method"] == "POST" else None
        if route is None:
            await self._others(scope, receive, send)
        else:
            scope["route"] = route
            await route.app(scope, receive, send)


class NamedRoute(Route):
    """A route that the log and the metrics can tell, whatever the path asked for."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> App:
    """It neither starts nor stops `llm`."""
    config = config or ServerConfig()
    service = Service(llm, config)
    return App(service, Metrics(llm, service.model_names[0]), config)


def _describe(service: Service, metrics: Metrics) -> list[tuple[Operation, Any]]:
    described: list[tuple[Operation, Any]] = [
        (Operation("POST", path, summary, kind), JsonEndpoint(kind, partial(handler, service)))
        for path, kind, handler, summary in _posts()]
    return described + [(Operation("GET", path, summary), handler)
                        for path, handler, summary in _gets(service, metrics)]


def _posts() -> list[tuple[str, type[Any], Callable[..., Awaitable[ASGIApp]], str]]:
    return [
        ("/v1/completions", CompletionRequest, completions.create_completion, "Complete prompts"),
        ("/v1/chat/completions", ChatCompletionRequest, chat.create_chat_completion, "Answer a conversation"),
        ("/generate", GenerateRequest, generate_route.generate, "Token ids in, token ids and log probabilities out"),
        ("/abort", AbortRequest, misc.abort, "End running requests"),
        ("/tokenize", TokenizeRequest, misc.tokenize, "Token ids of a text or conversation"),
        ("/detokenize", DetokenizeRequest, misc.detokenize, "The text of token ids"),
    ]


def _gets(service: Service, metrics: Metrics) -> list[tuple[str, Handler, str]]:
    plain: list[tuple[str, Callable[[Request], ASGIApp], str]] = [
        ("/v1/models", lambda request: misc.list_models(service), "The models served"),
        ("/v1/models/{name:path}", lambda request: misc.show_model(service, request.path_params["name"]), "One model"),
        ("/health", lambda request: misc.health(service), "Liveness: red once the engine failed"),
        ("/ready", lambda request: misc.ready(service), "Readiness: red while shutting down too"),
        ("/version", lambda request: misc.version(), "The version of this server"),
        ("/metrics", lambda request: metrics.render(), "Prometheus metrics"),
    ]
    return [(path, _on_loop(handler), summary) for path, handler, summary in plain]


def _dashboard_routes(service: Service) -> list[Route]:
    watchers = dashboard.Watchers(service)

    def stream(request: Request) -> ASGIApp:
        given = request.query_params.get("interval", "0.25")
        try:
            interval = float(given)
        except ValueError:
            raise bad_request(f"interval must be a number of seconds, got {given!r}", "interval") from None
        return watchers.stream(interval)

    return [_get("/dashboard", lambda request: dashboard.page()), _get("/dashboard/stream", stream),
            _get("/dashboard/static/{name}", lambda request: dashboard.static_file(request.path_params["name"]))]


def _get(path: str, handler: Callable[[Request], ASGIApp]) -> Route:
    return NamedRoute(path, _on_loop(handler), methods=["GET"])


def _on_loop(handler: Callable[[Request], ASGIApp]) -> Handler:
    """Starlette would run a plain function on a thread, beside the event loop that owns the service."""
    async def handle(request: Request) -> ASGIApp:
        return handler(request)
    return handle


def _error_handlers() -> dict[Any, Any]:
    async def show(request: Request, error: Exception) -> Response:
        known = as_api_error(error)
        assert known is not None, "only foreseen errors come here"
        return known.response()

    async def show_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        asked = f"{request.method} {request.url.path}"
        texts = {404: f"there is no {asked} here; /openapi.json lists what there is",
                 405: f"{asked} is not allowed, only {(error.headers or {}).get('Allow', 'other methods')}"}
        return ApiError(error.status_code, texts.get(error.status_code, str(error.detail)),
                        headers=error.headers).response()

    kinds = (ApiError, ValueError, QueueFullError, DrainingError, EngineDeadError, TimeoutError)
    return {**dict.fromkeys(kinds, show), HTTPException: show_http}
