"""GET /openapi.json: what the routes take, told by the models that check their bodies."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {
    "error": {"type": "object", "required": ["message", "type", "param", "code"]}}}
ERRORS = {400: "a field is wrong", 401: "no valid API key", 404: "no such model", 408: "took too long",
          409: "request id in use", 413: "body too large", 415: "not JSON", 429: "too many requests",
          500: "the engine failed", 503: "shutting down"}
REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. body: the model of its JSON body, for those that take one."""

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None


def document(operations: Sequence[Operation], version: str) -> dict[str, object]:
    bodies = [operation.body for operation in operations if operation.body is not None]
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=REFERENCE)
    paths: dict[str, dict[str, object]] = {}
    for operation in operations:
        paths.setdefault(_public(operation.path), {})[operation.method.lower()] = _describe(operation)
    return {"openapi": "3.1.0", "info": {"title": "ASPIRE", "version": version}, "paths": paths,
            "components": {"schemas": schemas.get("$defs", {}), "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"}}}, "security": [{}, {"key": []}]}


def _describe(operation: Operation) -> dict[str, object]:
    responses: dict[str, object] = {"200": {"description": "done"}}
    responses.update({str(status): {"description": text, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
                      for status, text in ERRORS.items()})
    words = re.findall(r"[a-z0-9]+", operation.path)
    described: dict[str, object] = {"summary": operation.summary, "responses": responses,
                                    "operationId": "_".join([operation.method.lower(), *words])}
    if operation.body is not None:
        schema = {"$ref": REFERENCE.format(model=operation.body.__name__)}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    names = re.findall(r"\{(\w+)", operation.path)
    if names:
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                                   for name in names]
    return described


def _public(path: str) -> str:
    """Without the router's converters: {name:path} is {name}."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)
