"""create_app: the routes, the guard before them and the error shapes. Knows AsyncLLM, never the engine class."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import Response

import aspire
from aspire.async_engine import AsyncLLM, DrainingError, EngineDeadError, QueueFullError
from aspire.server import chat, completions, dashboard, misc
from aspire.server import generate as generate_route
from aspire.server.config import ServerConfig
from aspire.server.errors import ApiError, as_api_error, bad_request
from aspire.server.metrics import Metrics
from aspire.server.middleware import AccessLog, Guard
from aspire.server.protocol import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from aspire.server.service import Service

ERROR_SCHEMA = {"application/json": {"schema": {"type": "object", "required": ["error"], "properties": {
    "error": {"type": "object", "required": ["message", "type", "param", "code"]}}}}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": ERROR_SCHEMA} for status, text in (
        (400, "a field is wrong"), (401, "no valid API key"), (404, "no such model"), (409, "request id in use"),
        (408, "took too long"), (413, "body too large"), (415, "not JSON"),
        (429, "too many requests"), (500, "the engine failed"), (503, "shutting down"))}


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """The server as an ASGI application. It neither starts nor stops `llm`."""
    config = config or ServerConfig()
    service = Service(llm, config)
    metrics = Metrics(llm, service.model_names[0])
    app = FastAPI(title="ASPIRE", version=aspire.__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_errors(app)
    _add_generation(app, service)
    _add_misc(app, service, metrics)
    if config.dashboard:
        _add_dashboard(app, service)
    app.add_middleware(Guard, config=config)
    if config.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(config.allowed_origins), allow_methods=["GET", "POST"],
                           allow_headers=["Authorization", "Content-Type", "X-Request-Id"])
    app.add_middleware(AccessLog, on_response=metrics.count_response)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await completions.create_completion(service, body, request)

    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        return await chat.create_chat_completion(service, body, request)

    async def generate(body: GenerateRequest, request: Request) -> Response:
        return await generate_route.generate(service, body, request)

    async def abort(body: AbortRequest) -> Response:
        return misc.abort(service, body)

    for path, handler in (("/v1/completions", create_completion), ("/v1/chat/completions", create_chat_completion),
                          ("/generate", generate), ("/abort", abort)):
        _route(app, "POST", path, handler)


def _add_misc(app: FastAPI, service: Service, metrics: Metrics) -> None:
    async def list_models() -> Response:
        return misc.list_models(service)

    async def show_model(name: str) -> Response:
        return misc.show_model(service, name)

    async def health() -> Response:
        return misc.health(service)

    async def ready() -> Response:
        return misc.ready(service)

    async def version() -> Response:
        return misc.version()

    async def scrape() -> Response:
        return metrics.render()

    async def tokenize(body: TokenizeRequest) -> Response:
        return await misc.tokenize(service, body)

    async def detokenize(body: DetokenizeRequest) -> Response:
        return misc.detokenize(service, body)

    for path, handler in (("/v1/models", list_models), ("/v1/models/{name:path}", show_model), ("/health", health),
                          ("/ready", ready), ("/version", version), ("/metrics", scrape)):
        _route(app, "GET", path, handler)
    for path, poster in (("/tokenize", tokenize), ("/detokenize", detokenize)):
        _route(app, "POST", path, poster)


def _add_dashboard(app: FastAPI, service: Service) -> None:
    watchers = dashboard.Watchers(service)

    async def page() -> Response:
        return dashboard.page()

    async def static_file(name: str) -> Response:
        return dashboard.static_file(name)

    async def stream(interval: float = 0.25) -> Response:
        return watchers.stream(interval)

    for path, handler in (("/dashboard", page), ("/dashboard/static/{name}", static_file),
                          ("/dashboard/stream", stream)):
        app.add_api_route(path, handler, methods=["GET"], response_class=Response, include_in_schema=False)


def _route(app: FastAPI, method: str, path: str, handler: Callable[..., Awaitable[Response]]) -> None:
    app.add_api_route(path, handler, methods=[method], responses=ERRORS, response_class=Response)


def _add_errors(app: FastAPI) -> None:
    async def show(request: Request, error: Exception) -> Response:
        known = as_api_error(error)
        assert known is not None, "only foreseen errors come here"
        return known.response()

    async def show_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _invalid(error).response()

    async def show_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    for kind in (ApiError, ValueError, QueueFullError, DrainingError, EngineDeadError, TimeoutError):
        app.add_exception_handler(kind, show)
    app.add_exception_handler(RequestValidationError, show_invalid)
    app.add_exception_handler(HTTPException, show_http)


def _invalid(error: RequestValidationError) -> ApiError:
    """The first complaint, with the field's name."""
    first = error.errors()[0]
    context = first.get("ctx") or {}
    if first["type"] == "unsupported_field":
        return bad_request(first["msg"], context.get("field"), "unsupported_field")
    parts = [str(part) for part in first["loc"] if part != "body"]
    name = parts[0] if parts else None
    if first["type"] == "extra_forbidden":
        return bad_request(f"{'.'.join(parts)} is not a known field", parts[-1], "unknown_field")
    if first["type"] == "json_invalid":
        return bad_request("the body must be valid JSON", code="invalid_json")
    return bad_request(f"{'.'.join(parts) or 'body'}: {first['msg']}", name)
