"""`aspire serve` and `python -m aspire.server`: every limit has a flag that reaches the server."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from aspire.async_engine import AsyncConfig
from aspire.cli.main import run
from aspire.cli.serve import SERVER_FLAGS
from aspire.server import __main__ as module
from aspire.server.config import ServerConfig

LIMITS = {"max_body_bytes": 1000, "max_prompts": 3, "max_n": 2, "max_output_tokens": 20, "max_grammar_bytes": 50,
          "request_timeout": 9.5, "read_timeout": 1.5, "write_timeout": 2.5, "shutdown_grace": 0.5}
ARGUMENTS = [word for name, value in LIMITS.items() for word in ("--" + name.replace("_", "-"), str(value))]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was handed over to the server, instead of a server."""
    calls: list[Any] = []

    def note(model: str, options: Any, config: ServerConfig, *, async_config: AsyncConfig | None = None) -> None:
        calls.append((model, config, async_config))
    monkeypatch.setattr("aspire.server.run.serve", note)
    monkeypatch.setattr(module, "serve", note)
    return calls


def check(calls: list[Any]) -> None:
    [(model, config, async_config)] = calls
    assert model == "some-model"
    assert {name: getattr(config, name) for name in LIMITS} == LIMITS
    assert async_config.max_live == 7


def test_limits_of_the_command(served: list[Any]) -> None:
    """Planted fault: max_n left out of the flags."""
    assert run(["serve", "some-model", "--max-live", "7", *ARGUMENTS]) == 0
    check(served)


def test_limits_of_the_module(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: limits parsed and dropped."""
    monkeypatch.setattr("sys.argv", ["aspire.server", "some-model", "--max-live", "7", *ARGUMENTS])
    module.main()
    check(served)


def test_help_names_every_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in (*LIMITS, "max_live") if "--" + name.replace("_", "-") not in shown] == []


def test_every_setting_has_a_flag() -> None:
    """Planted fault: a new field of ServerConfig without one."""
    renamed = {"served_model_name": "served_model_names", "tool_call_parser": "tool_format", "api_key": "api_keys",
               "reasoning_parser": "reasoning_format", "enable_log_requests": "log_prompts"}
    flags = {renamed.get(flag.name, flag.name) for flag in SERVER_FLAGS}
    assert {field.name for field in fields(ServerConfig)} - flags == {"default_sampling"}, "that one is the model's"
    assert flags - {field.name for field in fields(ServerConfig)} == {"api_key_file", "max_live", "log_level"}


@pytest.mark.parametrize("arguments", [["--max-n", "0"], ["--max-output-tokens", "0"], ["--read-timeout", "-1"],
                                       ["--request-timeout", "0"], ["--write-timeout", "nan"],
                                       ["--shutdown-grace", "-1"], ["--max-live", "0"]],
                         ids=" ".join)
def test_wrong_limits_are_refused_by_name(arguments: list[str], served: list[Any],
                                          capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "some-model", *arguments]) == 2
    error = capsys.readouterr().err
    assert arguments[0][2:].replace("-", "_") in error
    assert error.count("\n") == 1
    assert not served


@pytest.mark.parametrize("arguments", [["--tool-call-parser", "x"], ["--reasoning-parser", "x"], ["--api-key", " "],
                                       ["--chat-template", "/no/such"], ["--api-key-file", "/no/such"],
                                       ["--log-level", "x"]], ids=lambda arguments: arguments[0])
def test_errors_name_the_flag(arguments: list[str], served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: ServerConfig's own name (tool_format) shown for a flag of another name."""
    assert run(["serve", "some-model", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"aspire: error: {arguments[0][2:].replace('-', '_')} ")
    assert not served


@pytest.mark.parametrize("content", [b"", b"# no key yet\n\n", b"\xff\xfe"])
def test_a_key_file_without_keys_is_refused(content: bytes, tmp_path: Path, served: list[Any],
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: served without a key, open to all."""
    file = tmp_path / "keys"
    file.write_bytes(content)
    assert run(["serve", "some-model", "--api-key-file", str(file)]) == 2
    assert "api_key_file" in capsys.readouterr().err
    assert not served
