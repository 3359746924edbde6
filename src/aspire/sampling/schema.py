"""JSON schemas on their way to the grammar compiler: what it would silently leave out is refused, what it gets wrong
is corrected."""

import re
from typing import Any

Schema = dict[str, Any]

# Measured on xgrammar 0.2.9: an output that breaks one of these is let through.
UNENFORCED = ("contains", "contentSchema", "dependentRequired", "dependentSchemas", "dependencies", "else", "if",
              "maxContains", "minContains", "not", "then", "uniqueItems")
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer",
           "relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid")
ANNOTATIONS = ("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
               "discriminator", "example", "examples", "readOnly", "title", "writeOnly")
MAX_DEPTH = 100
LITERAL_OR_CLASS = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')  # of xgrammar's EBNF
FORBIDDEN = r'\0-\x1f\"\\'
ANYTHING = r"[\0-\U0010ffff]"
BLANKS = r"[\f\n\r\t\v"  # how \s begins; JSON's own white space is another class
_ONE = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")


def check_schema(schema: Any, where: str = "#", depth: int = 0) -> None:
    """Raises ValueError naming the place of the first constraint that could not be enforced, or of what is no schema.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{where} must be a JSON schema (an object or a boolean), got {schema!r}")
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} must be nested at most {MAX_DEPTH} levels deep")
    _check_keywords(schema, where)
    _check_strings(schema, where)
    for key in _ONE:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            check_schema(schema[key], f"{where}/{key}", depth + 1)
    for key in _LIST:
        for index, part in enumerate(_typed(schema, key, list, where)):
            check_schema(part, f"{where}/{key}/{index}", depth + 1)
    for key in _NAMED:
        for name, part in _typed(schema, key, dict, where).items():
            check_schema(part, f"{where}/{key}/{name}", depth + 1)


def _typed(schema: Schema, key: str, kind: type, where: str) -> Any:
    value = schema.get(key, kind())
    if not isinstance(value, kind):
        raise ValueError(f"{where}/{key} must be {'a list' if kind is list else 'an object'}, got {value!r}")
    return value


def _check_keywords(schema: Schema, where: str) -> None:
    for key in UNENFORCED:
        if key in schema and schema[key] is not False:
            raise ValueError(f"{where}/{key} is not supported: the constraint could not be enforced")
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and reference.startswith("#")):
        raise ValueError(f"{where}/$ref must point into the schema itself (#...), got {reference!r}")
    if len(_typed(schema, "allOf", list, where)) > 1:
        raise ValueError(f"{where}/allOf is supported with one entry only, got {len(schema['allOf'])}")
    for key in ("allOf", "anyOf", "oneOf"):
        others = [other for other in schema if key in schema and other != key and other not in ANNOTATIONS]
        if others:
            raise ValueError(f"{where}/{key} cannot be combined with {', '.join(sorted(others))}: only one of them "
                             "could be enforced")


def _check_strings(schema: Schema, where: str) -> None:
    if "format" in schema and schema["format"] not in FORMATS:
        raise ValueError(f"{where}/format must be one of {', '.join(FORMATS)}, got {schema['format']!r}")
    lengths = [key for key in ("minLength", "maxLength") if key in schema]
    kinds = [key for key in ("format", "pattern") if key in schema] + lengths[:1]
    if len(kinds) > 1:
        raise ValueError(f"{where}/{kinds[0]} cannot be combined with {', '.join(kinds[1:])}: only one of them could "
                         "be enforced")
    patterns = [schema["pattern"]] if "pattern" in schema else []
    for pattern in [*patterns, *_typed(schema, "patternProperties", dict, where)]:
        if not isinstance(pattern, str) or '"' in pattern or "\\\\" in pattern:
            raise ValueError(f"{where}/pattern must be a regular expression without quotes and escaped backslashes, "
                             f"which would come out unescaped, got {pattern!r}")


def close_strings(grammar: str) -> str:
    """The EBNF that xgrammar makes of a schema, with control characters, quotes and backslashes taken out of the
    character classes that match the insides of strings: without it, strings of bounded length and some patterns come
    out as text that no JSON parser takes."""
    def strict(match: re.Match[str]) -> str:
        part = match[0]
        if part.startswith("[^") and FORBIDDEN not in part:
            return f"[^{FORBIDDEN}{part[2:]}"
        if part == ANYTHING:
            return f"[^{FORBIDDEN}]"
        return "[" + part[len(BLANKS) :] if part.startswith(BLANKS) else part

    return LITERAL_OR_CLASS.sub(strict, grammar)
