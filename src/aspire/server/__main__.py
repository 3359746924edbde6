"""`python -m aspire.server MODEL [--host ...]`: the server without the command-line extra. Keys may come from the
environment (ASPIRE_API_KEY, VLLM_API_KEY)."""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from aspire.async_engine import AsyncConfig
from aspire.config import EngineOptions
from aspire.server.config import REASONING_FORMATS, TOOL_FORMATS, ServerConfig
from aspire.server.run import serve

LIMITS = (
    ("max_body_bytes", int, "largest request body"),
    ("max_prompts", int, "prompts of a completions request"),
    ("max_n", int, "outputs per prompt"),
    ("max_output_tokens", int, "output tokens"),
    ("max_grammar_bytes", int, "longest JSON schema, regex or grammar"),
    ("request_timeout", float, "seconds from acceptance to the last token"),
    ("read_timeout", float, "seconds for a body to arrive"),
    ("write_timeout", float, "seconds after which a client that takes nothing is cut off"),
    ("shutdown_grace", float, "seconds that running requests get after SIGTERM"),
)


def main() -> None:
    arguments = _parser().parse_args()
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options: dict[str, Any] = {name: getattr(arguments, name) for name in
                               ("policy", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "num_blocks",
                                "block_size", "dtype", "load_format") if getattr(arguments, name) is not None}
    try:
        serve(arguments.model, EngineOptions(**options), _config(arguments),  # type: ignore[typeddict-item]
              async_config=AsyncConfig(max_live=arguments.max_live))
    except ValueError as error:
        print(f"aspire.server: {error}", file=sys.stderr)
        sys.exit(2)


def read_file(name: str, path: str) -> str:
    """The text of a file that the flag `name` gives."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} must be a readable text file, got {path!r} ({error})") from None


def read_api_keys(given: list[str], file: str | None, environment: dict[str, str]) -> tuple[str, ...]:
    """Keys from flags, from a file (one a line, # begins a comment) and from the environment."""
    keys = list(given)
    if file is not None:
        lines = read_file("api_key_file", file).splitlines()
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:  # else the server would be open to all
            raise ValueError(f"api_key_file must hold a key, got {file!r}, which has none")
        keys += found
    keys += [environment[name] for name in ("ASPIRE_API_KEY", "VLLM_API_KEY") if environment.get(name)]
    return tuple(keys)


def _config(arguments: argparse.Namespace) -> ServerConfig:
    limits: dict[str, Any] = {name: getattr(arguments, name) for name, _, _ in LIMITS
                              if getattr(arguments, name) is not None}
    template = None if arguments.chat_template is None else read_file("chat_template", arguments.chat_template)
    return ServerConfig(
        host=arguments.host, port=arguments.port, served_model_names=tuple(arguments.served_model_name),
        api_keys=read_api_keys(arguments.api_key, arguments.api_key_file, dict(os.environ)),
        allowed_origins=tuple(arguments.allowed_origins), tool_format=arguments.tool_call_parser,
        reasoning_format=arguments.reasoning_parser, chat_template=template,
        log_prompts=arguments.enable_log_requests, dashboard=not arguments.disable_dashboard, **limits)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m aspire.server")
    add = parser.add_argument
    add("model")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--served-model-name", nargs="+", default=[])
    add("--api-key", nargs="+", default=[])
    add("--api-key-file")
    add("--allowed-origins", nargs="+", default=[], help="web pages that may call this server (CORS)")
    add("--max-live", type=int, default=1024, help="outputs running or waiting; more get 429")
    for name, kind, text in LIMITS:
        add("--" + name.replace("_", "-"), type=kind, help=text)
    add("--tool-call-parser", choices=TOOL_FORMATS, default="auto")
    add("--reasoning-parser", choices=REASONING_FORMATS, default="auto")
    add("--chat-template", help="file with a Jinja template instead of the model's")
    add("--enable-log-requests", action="store_true", help="log request bodies, prompts included")
    add("--disable-dashboard", action="store_true")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    for name in ("policy", "dtype", "load-format"):
        add(f"--{name}")
    for name in ("max-num-seqs", "max-model-len", "max-num-batched-tokens", "num-blocks", "block-size"):
        add(f"--{name}", type=int)
    return parser


if __name__ == "__main__":
    main()
