"""From request bodies to SamplingParams: one place for defaults, limits and the names of constraints."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aspire.request import SamplingParams, StructuredOutputs
from aspire.server.config import ServerConfig
from aspire.server.errors import bad_request
from aspire.server.protocol import GenerateSampling, SamplingBody, StructuredOutputsBody

MAX_SCHEMA_DEPTH = 64
MAX_REPEAT = 4096  # of {m,n} in a regex, and of the counts in a schema: each repeat costs grammar states
COUNT_KEYS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
OPTIONAL_FIELDS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                   "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Extras:
    """What a route decides besides the body."""

    max_tokens: int | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: StructuredOutputs | None = None  # instead of the body's own


def sampling_params(body: SamplingBody, extras: Extras, config: ServerConfig, vocab_size: int) -> SamplingParams:
    """Raises ApiError or ValueError, both naming the field."""
    _check_limits(body.n, extras.max_tokens, body.stop, config)
    values = dict(config.default_sampling)
    values.update({name: getattr(body, name) for name in OPTIONAL_FIELDS if getattr(body, name) is not None})
    fields: dict[str, Any] = {
        **values, "n": body.n, "seed": body.seed, "max_tokens": extras.max_tokens, "min_tokens": body.min_tokens,
        "stop": body.stop or (), "stop_token_ids": _tokens("stop_token_ids", body.stop_token_ids, vocab_size),
        "ignore_eos": body.ignore_eos, "include_stop_str_in_output": body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens, "logprobs": extras.logprobs,
        "prompt_logprobs": extras.prompt_logprobs, "logit_bias": _logit_bias(body.logit_bias, vocab_size),
        "bad_words": body.bad_words or (), "structured_outputs": extras.constraint or _constraint(body, config),
    }
    return SamplingParams(**fields)


def generate_params(body: GenerateSampling, config: ServerConfig, vocab_size: int) -> SamplingParams:
    """The same for /generate, whose fields are SamplingParams' own."""
    _check_limits(body.n, body.max_tokens, body.stop, config)
    fields = {name: getattr(body, name) for name in GenerateSampling.model_fields}
    fields["stop"] = body.stop or ()
    fields["stop_token_ids"] = _tokens("stop_token_ids", body.stop_token_ids, vocab_size)
    fields["logit_bias"] = _logit_bias(body.logit_bias, vocab_size)
    fields["bad_words"] = body.bad_words or ()
    fields["structured_outputs"] = _structured(body.structured_outputs, config)
    return SamplingParams(**fields)


def json_constraint(schema: dict[str, Any], name: str, config: ServerConfig) -> StructuredOutputs:
    """A JSON schema as a constraint, within the server's limits. name: the field it comes from."""
    check_schema(schema, name, config)
    return StructuredOutputs(json=schema)


def check_schema(schema: str | dict[str, Any], name: str, config: ServerConfig) -> None:
    """Bound what compiling a schema can cost. Raises ApiError."""
    if isinstance(schema, str):
        _check_size(schema, name, config)
        try:
            schema = json.loads(schema)
        except (json.JSONDecodeError, RecursionError) as error:
            raise bad_request(f"{name} must be JSON: {error}", name) from error
        if not isinstance(schema, (dict, bool)):
            raise bad_request(f"{name} must be a JSON object", name)
    _check_node(schema, name, config, 0)
    _check_size(json.dumps(schema), name, config)


def _check_limits(n: int, max_tokens: int | None, stop: str | list[str] | None, config: ServerConfig) -> None:
    if n > config.max_n:
        raise bad_request(f"n must be at most {config.max_n}, got {n}", "n")
    limit = config.max_output_tokens
    if limit is not None and max_tokens is not None and max_tokens > limit:
        raise bad_request(f"max_tokens must be at most {limit}, got {max_tokens}", "max_tokens")
    if isinstance(stop, list) and len(stop) > 64:
        raise bad_request(f"stop must hold at most 64 strings, got {len(stop)}", "stop")


def _tokens(name: str, tokens: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    for token in tokens or ():
        if token >= vocab_size:
            raise bad_request(f"{name} must hold token ids below {vocab_size}, got {token}", name)
    return tuple(tokens or ())


def _logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    result = {}
    for key, value in bias.items():
        if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) >= vocab_size:
            raise bad_request(f"logit_bias must be keyed by token ids below {vocab_size}, got {key!r}", "logit_bias")
        result[int(key)] = value
    return result


def _constraint(body: SamplingBody, config: ServerConfig) -> StructuredOutputs | None:
    """At most one of response_format, structured_outputs and guided_*."""
    guided = {"guided_json": body.guided_json, "guided_regex": body.guided_regex, "guided_choice": body.guided_choice,
              "guided_grammar": body.guided_grammar}
    found = {"response_format": _response_format(body, config),
             "structured_outputs": _structured(body.structured_outputs, config)}
    found.update({name: _build({name.removeprefix("guided_"): value}, name, config)
                  for name, value in guided.items() if value is not None})
    sent = [name for name, constraint in found.items() if constraint is not None]
    if len(sent) > 1:
        raise bad_request(f"{' and '.join(sent)} exclude each other", sent[0])
    return found[sent[0]] if sent else None


def _response_format(body: SamplingBody, config: ServerConfig) -> StructuredOutputs | None:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutputs(json_object=True)
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise bad_request("response_format.json_schema must have a schema", "response_format")
    return _build({"json": asked.json_schema.schema_}, "response_format", config)


def _structured(asked: StructuredOutputsBody | None, config: ServerConfig) -> StructuredOutputs | None:
    if asked is None:
        return None
    fields = {"json": asked.json_, "json_object": asked.json_object or None, "regex": asked.regex,
              "choice": asked.choice, "grammar": asked.grammar}
    return _build({name: value for name, value in fields.items() if value is not None}, "structured_outputs", config)


def _build(fields: dict[str, Any], name: str, config: ServerConfig) -> StructuredOutputs:
    if "json" in fields:
        check_schema(fields["json"], name, config)
    if "regex" in fields:
        _check_regex(fields["regex"], name, config)
    if "grammar" in fields:
        _check_size(fields["grammar"], name, config)
    if "choice" in fields:
        _check_size("".join(fields["choice"]), name, config)
        fields["choice"] = tuple(fields["choice"])
    return StructuredOutputs(**fields)


def _check_size(text: str, name: str, config: ServerConfig) -> None:
    if len(text) > config.max_grammar_bytes:
        raise bad_request(f"{name} must have at most {config.max_grammar_bytes} characters, got {len(text)}", name)


def _check_regex(pattern: object, name: str, config: ServerConfig) -> None:
    if not isinstance(pattern, str):
        return
    _check_size(pattern, name, config)
    product = 1
    for count in re.findall(r"\{(?:\d*,)?(\d+),?\}", pattern):
        product *= max(1, int(count[:9]))
        if product > MAX_REPEAT:
            raise bad_request(f"{name} must not repeat more than {MAX_REPEAT} times in all, got {pattern[:80]!r}", name)


def _check_node(node: object, name: str, config: ServerConfig, depth: int) -> None:
    if depth > MAX_SCHEMA_DEPTH:
        raise bad_request(f"{name} must be nested at most {MAX_SCHEMA_DEPTH} deep", name)
    if isinstance(node, dict):
        for key in COUNT_KEYS:
            value = node.get(key)
            if isinstance(value, (int, float)) and value > MAX_REPEAT:
                raise bad_request(f"{name}: {key} must be at most {MAX_REPEAT}, got {value}", name)
        _check_regex(node.get("pattern"), name, config)
        for value in node.values():
            _check_node(value, name, config, depth + 1)
    elif isinstance(node, list):
        for value in node:
            _check_node(value, name, config, depth + 1)
