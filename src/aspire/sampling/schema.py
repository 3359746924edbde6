"""Which JSON schemas are refused: those with constraints that the grammar would silently leave out."""

from typing import Any

# Measured on xgrammar 0.2.9: an output that breaks one of these is let through.
UNENFORCED = ("contains", "contentSchema", "dependentRequired", "dependentSchemas", "dependencies", "else", "if",
              "maxContains", "minContains", "not", "then", "uniqueItems")
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer",
           "relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid")
ANNOTATIONS = ("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
               "discriminator", "example", "examples", "readOnly", "title", "writeOnly")
_ONE = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
MAX_DEPTH = 100


def check_schema(schema: Any, where: str = "#", depth: int = 0) -> None:
    """ValueError naming the place of the first constraint that would not be enforced, or of a part that is no schema."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{where} must be a JSON schema (an object or a boolean), got {schema!r}")
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} must be nested at most {MAX_DEPTH} levels deep")
    _check_keywords(schema, where)
    for key in _ONE:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            check_schema(schema[key], f"{where}/{key}", depth + 1)
    for key in _LIST:
        for index, part in enumerate(_typed(schema, key, list, where)):
            check_schema(part, f"{where}/{key}/{index}", depth + 1)
    for key in _NAMED:
        for name, part in _typed(schema, key, dict, where).items():
            check_schema(part, f"{where}/{key}/{name}", depth + 1)


def _typed(schema: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = schema.get(key, kind())
    if not isinstance(value, kind):
        raise ValueError(f"{where}/{key} must be {'a list' if kind is list else 'an object'}, got {value!r}")
    return value


def _check_keywords(schema: dict[str, Any], where: str) -> None:
    for key in UNENFORCED:
        if key in schema and schema[key] is not False:
            raise ValueError(f"{where}/{key} is not supported: the constraint could not be enforced")
    if "format" in schema and schema["format"] not in FORMATS:
        raise ValueError(f"{where}/format must be one of {', '.join(FORMATS)}, got {schema['format']!r}")
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and reference.startswith("#")):
        raise ValueError(f"{where}/$ref must point into the schema itself (#...), got {reference!r}")
    if len(schema.get("allOf", ())) > 1:
        raise ValueError(f"{where}/allOf is supported with one entry only, got {len(schema['allOf'])}")
    for key in ("allOf", "anyOf", "oneOf"):
        others = [other for other in schema if key in schema and other != key and other not in ANNOTATIONS]
        if others:
            raise ValueError(f"{where}/{key} cannot be combined with {', '.join(sorted(others))}: only one of them "
                             "could be enforced")
