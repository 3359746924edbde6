"""The small routes: models, health, readiness, version, tokenize, detokenize, abort."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import aspire
from aspire.server.chat_prompt import chat_prompt
from aspire.server.errors import ApiError, bad_request
from aspire.server.protocol import AbortRequest, DetokenizeRequest, TokenizeRequest
from aspire.server.service import Service


def list_models(service: Service) -> Response:
    return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.model_names]})


def show_model(service: Service, name: str) -> Response:
    return JSONResponse(_model(service, service.check_model(name)))


def health(service: Service) -> Response:
    """Liveness: red once the engine failed; restart the process then."""
    failure = service.llm.failure
    if failure is not None:
        return ApiError(503, f"the engine failed: {failure!r}", code="engine_dead").response()
    return JSONResponse({"status": "ok"})


def ready(service: Service) -> Response:
    """Readiness: red while shutting down too; send no new requests then."""
    if not service.llm.accepting:
        return ApiError(503, "not accepting requests", code="not_ready").response()
    return JSONResponse({"status": "ready"})


def version() -> Response:
    return JSONResponse({"version": aspire.__version__})


async def tokenize(service: Service, body: TokenizeRequest, request: Request) -> Response:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("exactly one of prompt and messages must be given", "prompt")
    special = body.add_special_tokens
    if body.messages is not None:
        text = chat_prompt(service, body, body.messages, body.tools)
        special = bool(special)
    else:
        text, special = body.prompt or "", True if special is None else special
    tokens = await service.llm.encode(text, add_special_tokens=special)
    answer: dict[str, object] = {"count": len(tokens), "max_model_len": service.llm.max_model_len, "tokens": tokens}
    answer["token_strs"] = ([str(name) for name in service.llm.tokenizer.convert_ids_to_tokens(tokens)]
                            if body.return_token_strs else None)
    return JSONResponse(answer)


async def detokenize(service: Service, body: DetokenizeRequest, request: Request) -> Response:
    service.check_model(body.model)
    service.check_tokens(body.tokens, "tokens")
    return JSONResponse({"prompt": service.llm.tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def abort(service: Service, body: AbortRequest, request: Request) -> Response:
    """Ends requests by the ids of their responses; ids that do not run are listed as not found."""
    given = [*(body.request_ids or ()), *([body.request_id] if body.request_id is not None else ())]
    if not given:
        raise bad_request("request_id or request_ids must be given", "request_id")
    found = {one: service.find_job(one) for one in given}
    aborted = [one for one, job_id in found.items() if job_id is not None and service.abort(job_id)]
    return JSONResponse({"aborted": aborted, "not_found": [one for one in found if one not in aborted]})


def _model(service: Service, name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": service.created, "owned_by": "aspire",
            "root": service.llm.model_name, "parent": None, "max_model_len": service.llm.max_model_len}
