"""`aspire serve`: turns flags into a ServerConfig and hands over to the server."""

import logging
import os
from typing import Annotated, Any

import typer

from aspire.cli.options import (
    ADDRESS_FLAGS,
    ENGINE_FLAGS,
    Flag,
    Group,
    read_json_fields,
    with_calibration,
    with_flags,
)

# Names as in vLLM where it has one; `_RENAMED` leads to ServerConfig's.
SERVER_FLAGS = (
    *ADDRESS_FLAGS,
    Flag("served_model_name", list[str], "Name shown to clients; may be repeated", "NAME"),
    Flag("api_key", list[str], "Key that clients must send; may be repeated", "KEY"),
    Flag("api_key_file", str, "File with one key a line", "FILE"),
    Flag("allowed_origins", list[str], "Web page that may call this server (CORS); may be repeated", "ORIGIN"),
    Flag("max_live", int, "Outputs (requests times n) running or waiting; more get 429; default 1024", "N"),
    Flag("max_body_bytes", int, "Largest request body; default 16 MiB", "N"),
    Flag("max_prompts", int, "Most prompts of a completions request; default 1024", "N"),
    Flag("max_n", int, "Most outputs per prompt; default 64", "N"),
    Flag("max_output_tokens", int, "Most output tokens; default the model's limit", "N"),
    Flag("max_grammar_bytes", int, "Longest JSON schema, regex or grammar; default 64 KiB", "N"),
    Flag("request_timeout", float, "Seconds from acceptance to the last token; default no limit", "SECONDS"),
    Flag("read_timeout", float, "Seconds for a body to arrive; default 60", "SECONDS"),
    Flag("write_timeout", float, "Seconds after which a client that takes nothing is cut off; default 60", "SECONDS"),
    Flag("shutdown_grace", float, "Seconds that running requests get after SIGTERM; default 30", "SECONDS"),
    Flag("tool_call_parser", str, "auto, hermes, llama3_json or none", "NAME"),
    Flag("reasoning_parser", str, "auto, think or none", "NAME"),
    Flag("chat_template", str, "File with a Jinja template instead of the model's", "FILE"),
    Flag("enable_log_requests", bool, "Log request bodies, prompts included"),
    Flag("dashboard", bool, "Serve the page /dashboard"),
    Flag("log_level", str, "debug, info (default), warning or error", "NAME"),
)
_RENAMED = (("served_model_name", "served_model_names"), ("tool_call_parser", "tool_format"),
            ("reasoning_parser", "reasoning_format"), ("enable_log_requests", "log_prompts"), ("api_key", "api_keys"))
_LISTS = ("served_model_names", "allowed_origins")
LOG_LEVELS = ("debug", "info", "warning", "error")


@with_flags(engine=ENGINE_FLAGS, server=SERVER_FLAGS)
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id, folder, GGUF file or smollm2-135m")],
    *,
    engine: Group,
    server: Group,
) -> None:
    """Serve a model over HTTP until Ctrl-C or SIGTERM. Keys may also come from ASPIRE_API_KEY or VLLM_API_KEY."""
    level = server.pop("log_level", "info")
    if level not in LOG_LEVELS:
        raise ValueError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _require_server_packages()
    from aspire.async_engine import AsyncConfig
    from aspire.server.run import serve as run_server

    max_live = server.pop("max_live", AsyncConfig().max_live)
    options: Any = with_calibration(read_json_fields(engine))
    run_server(model, options, server_config(server), async_config=AsyncConfig(max_live=max_live))


def _require_server_packages() -> None:
    try:
        import aspire.server.app  # noqa: F401
    except ImportError as error:
        raise ValueError(f"serving needs more packages: pip install 'aspire-llm[server]' ({error})") from None


def server_config(flags: Group) -> Any:
    """The ServerConfig of the given flags; fields without a flag keep their defaults."""
    from aspire.server.__main__ import read_api_keys, read_file
    from aspire.server.config import ServerConfig

    fields = dict(flags)
    fields["api_keys"] = read_api_keys(fields.pop("api_key", []), fields.pop("api_key_file", None), dict(os.environ))
    for flag, field in _RENAMED:
        if flag in fields:
            fields[field] = fields.pop(flag)
    for name in _LISTS:
        if name in fields:
            fields[name] = tuple(fields[name])
    if "chat_template" in fields:
        fields["chat_template"] = read_file("chat_template", fields["chat_template"])
    try:
        return ServerConfig(**fields)
    except ValueError as error:
        raise ValueError(_as_typed(str(error))) from None


def _as_typed(message: str) -> str:
    """A complaint about a field, with the name of the flag that it came from."""
    for flag, field in _RENAMED:
        if message.startswith(field + " "):
            return flag + message[len(field):]
    return message
