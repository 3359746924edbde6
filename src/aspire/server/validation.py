"""From the bytes of a body to a checked request, or to an error that names the field as the client sent it."""

import json
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from aspire.server.errors import ApiError, bad_request
from aspire.server.protocol import Body

Checked = TypeVar("Checked", bound=Body)


def read_body(raw: bytes, kind: type[Checked]) -> Checked:
    """Raises ApiError naming the field at fault."""
    try:
        # Given bytes, json would also take UTF-16, and lone surrogates that no route can encode again.
        data = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise bad_request("the body must be valid JSON in UTF-8", code="invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _invalid(data, error.errors(include_url=False)) from None


def _invalid(data: object, errors: Sequence[ErrorDetails]) -> ApiError:
    """The first complaint. Where a field may be of several types, pydantic complains for each: of those, the one that
    came furthest into the client's data counts, and equals are named together."""
    first = field_path(data, errors[0])
    about = [(path, error) for path, error in ((field_path(data, error), error) for error in errors)
             if path[:len(first)] == first]
    path, error = max(about, key=lambda pair: len(pair[0]))
    name = shown(path)
    if error["type"] == "unsupported_field":
        return bad_request(f"{name} is not supported by this server", name, "unsupported_field")
    if error["type"] == "extra_forbidden":
        return bad_request(f"{name} is not a known field", name, "unknown_field")
    texts = dict.fromkeys(error["msg"] for other, error in about if other == path)
    return bad_request(f"{name or 'body'}: {', or: '.join(texts)}", name or None)


def field_path(data: object, error: ErrorDetails) -> tuple[int | str, ...]:
    """Where in the client's data an error lies: its location without the names of types that were tried."""
    path: list[int | str] = []
    for part in error["loc"]:
        within = part < len(data) if isinstance(data, list) and isinstance(part, int) else (
            isinstance(data, dict) and part in data)
        if within:
            data = data[part]  # type: ignore[index, call-overload]
            path.append(part)
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    if error["type"] == "unsupported_field":
        path.append(error["ctx"]["field"])
    return tuple(path)


def shown(path: Sequence[int | str]) -> str:
    """messages[0].role, as OpenAI writes it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
