"""The command line on a tiny random model: what it prints, how it refuses, how it ends."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aspire.cli import generate as generate_module
from aspire.cli.main import COMMANDS, _load, run
from aspire.cli.options import ENGINE_FLAGS, SAMPLING_FLAGS
from aspire.config import EngineOptions
from aspire.engine import Engine
from aspire.llm import LLM
from aspire.outputs import RequestGroup
from aspire.request import SamplingParams
from aspire.testing.models import tiny_model

SMALL = ["--max-model-len", "128", "--max-num-seqs", "4"]
JSON_FIELDS = ["prompt", "text", "token_ids", "finish_reason", "num_prompt_tokens", "num_output_tokens", "policy",
               "num_verifications", "num_drafted", "num_accepted", "acceptance_rate", "tokens_per_verification"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


def refused(status: int, error: str) -> bool:
    """One line on stderr and status 2."""
    return status == 2 and error.startswith("aspire: error: ") and error.count("\n") == 1


def test_json_has_the_promised_fields_in_order(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: num_output_tokens counted the prompt."""
    prompts = ["--prompt", "Hello there", "--prompt", "Goodbye"]
    assert run(["generate", model, *prompts, "--max-tokens", "9", "--ignore-eos", "--json", *SMALL]) == 0
    captured = capsys.readouterr()
    entries = [json.loads(line) for line in captured.out.splitlines()]
    assert [list(entry) for entry in entries] == [JSON_FIELDS] * 2
    assert [entry["prompt"] for entry in entries] == ["Hello there", "Goodbye"]
    for entry in entries:
        assert entry["num_output_tokens"] == len(entry["token_ids"]) == 9
        assert entry["finish_reason"] == "length"
        assert entry["policy"] == "aspire"
        assert entry["tokens_per_verification"] == pytest.approx(
            (entry["num_accepted"] + entry["num_verifications"]) / entry["num_verifications"])
    assert captured.err == ""


def test_policy_and_company_do_not_change_tokens(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: the seed of a request taken from its index in the batch."""
    sampled = ["--temperature", "0.8", "--seed", "5", "--max-tokens", "12", "--json", *SMALL]
    run(["generate", model, "--prompt", "one two", "--policy", "autoregressive", *sampled])
    alone = json.loads(capsys.readouterr().out)
    run(["generate", model, "--prompt", "three", "--prompt", "one two", "--policy", "pillar", *sampled])
    together = json.loads(capsys.readouterr().out.splitlines()[1])
    assert together["token_ids"] == alone["token_ids"]
    run(["generate", model, "--prompt", "one two", *[*sampled[:3], "6", *sampled[4:]]])
    assert json.loads(capsys.readouterr().out)["token_ids"] != alone["token_ids"]


def test_several_outputs_and_logprobs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: only the first output's tokens counted."""
    run(["generate", model, "--prompt", "abc", "-n", "2", "--temperature", "1", "--seed", "1", "--max-tokens", "5",
         "--ignore-eos", "--logprobs", "2", "--json", *SMALL])
    entry = json.loads(capsys.readouterr().out)
    assert entry["num_output_tokens"] == 10
    assert len(entry["outputs"]) == 2
    assert entry["outputs"][0]["token_ids"] == entry["token_ids"] != entry["outputs"][1]["token_ids"]
    assert [item["token_id"] for item in entry["logprobs"]] == entry["token_ids"]
    assert all(len(item["top"]) == 2 and item["logprob"] <= 0 for item in entry["logprobs"])


def test_text_has_headings_only_where_needed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: a heading above a single text."""
    run(["generate", model, "--prompt", "abc", "--max-tokens", "3", *SMALL])
    assert "===" not in capsys.readouterr().out
    run(["generate", model, "--prompt", "abc", "--prompt", "d", "--max-tokens", "3", *SMALL])
    out = capsys.readouterr().out
    assert "=== prompt 0\n" in out
    assert "=== prompt 1\n" in out


def test_stats_table_goes_to_stderr(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: the table on stdout, where it spoils --json."""
    run(["generate", model, "--prompt", "abc", "--max-tokens", "5", "--json", "--stats", *SMALL])
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "verifications" in captured.err
    assert "total" in captured.err


def test_stats_file_feeds_trace(model: str, tmp_path: Path) -> None:
    """Planted fault: the observer not handed to the engine."""
    pytest.importorskip("matplotlib")
    record = tmp_path / "run.jsonl"
    assert run(["generate", model, "--prompt", "abc", "--max-tokens", "6", "--stats-file", str(record), *SMALL]) == 0
    assert run(["trace", str(record), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "run-timeline.png").exists()


@pytest.mark.parametrize(("content", "prompts"), [
    ("one\n\n two \n", ["one", " two "]),
    ('{"prompt": "a"}\n{"prompt": "b\\nc", "id": 3}\n', ["a", "b\nc"]),
    ("[1]\n", ["[1]"]),
], ids=["lines", "json", "bracket"])
def test_prompt_files(content: str, prompts: list[str], tmp_path: Path) -> None:
    """Planted fault: blank lines taken as empty prompts."""
    (tmp_path / "p").write_text(content)
    assert generate_module.read_prompts(str(tmp_path / "p")) == prompts


@pytest.mark.parametrize(("arguments", "named"), [
    (["--prompt", "a", "--max-tokens", "0"], "max_tokens"),
    (["--prompt", "a", "--max-tokens", "-3"], "-3"),
    (["--prompt", "a", "--temperature", "-1"], "temperature"),
    (["--prompt", "a", "--temperature", "nan"], "temperature"),
    (["--prompt", "a", "--top-p", "1.5"], "top_p"),
    (["--prompt", "a", "--top-p", "0"], "top_p"),
    (["--prompt", "a", "--policy", "hope"], "aspire-paper"),
    (["--prompt", "a", "--stop", ""], "stop"),
    (["--prompt", "a", "--hf-overrides", "[1]"], "hf_overrides"),
    (["--prompt", "a", "--hf-overrides", "{"], "hf_overrides"),
    (["--prompt", "a", "--policy-overrides", '{"bugdet": 64}'], "bugdet"),
    (["--prompt", "a", "--policy-overrides", '{"budget": "x"}'], "budget"),
    (["--prompt", "a", "--policy-overrides", '{"drafts": -1}'], "-1"),
    (["--prompt", "a", "--policy-overrides", '{"refresh": [99]}'], "refresh"),
    (["--prompt", "a", "--max-tokens", "many"], "many"),
    (["--prompt", "a", "--no-such-flag"], "--no-such-flag"),
    (["--prompt", "a", "--num-blocks", "0"], "num_blocks"),
    (["--prompt", "a", "--stats-file", "/no/such/folder/x"], "stats_file"),
    ([], "prompt"),
    (["--prompt-file", "/no/such/file"], "prompt_file"),
    (["--prompt", ""], "prompt"),
    (["--prompt", "x" * 500], "max_model_len"),
], ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else value)
def test_bad_values_are_one_line_and_status_2(arguments: list[str], named: str, model: str,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: a ValueError's traceback."""
    status = run(["generate", model, *SMALL, *arguments])
    error = capsys.readouterr().err
    assert refused(status, error), error
    assert named in error


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "missing.gguf"])
def test_unknown_models_are_refused(name: str, capsys: pytest.CaptureFixture[str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: an OSError of the hub client."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status = run(["generate", name, "--prompt", "a"])
    error = capsys.readouterr().err
    assert refused(status, error), error
    assert name in error


def test_one_bad_prompt_does_not_disturb_the_others(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: the first refusal ended the whole run."""
    good = ["--prompt", "abc", "--max-tokens", "8", "--json", *SMALL]
    assert run(["generate", model, *good]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert run(["generate", model, "--prompt", "x" * 500, *good]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["token_ids"] == alone["token_ids"]
    assert captured.err.startswith("aspire: error: prompt 0: ")
    assert captured.err.count("\n") == 1


def test_interrupt_prints_what_is_finished(model: str, capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: KeyboardInterrupt passed on before the finished outputs were printed."""
    advance = Engine.advance
    ended: list[str] = []

    def interrupt(engine: Engine) -> list[RequestGroup]:
        if ended:
            raise KeyboardInterrupt
        groups = advance(engine)
        ended.extend(group.request_id for group in groups if group.is_finished)
        return groups

    monkeypatch.setattr(Engine, "advance", interrupt)
    prompts = [word for i in range(3) for word in ("--prompt", f"prompt {i}")]
    status = run(["generate", model, *prompts, "--max-tokens", "5", "--json", "--max-num-seqs", "1",
                  "--max-model-len", "64"])
    captured = capsys.readouterr()
    assert status == 130
    assert [json.loads(line)["prompt"] for line in captured.out.splitlines()] == ["prompt 0"]
    assert captured.err == "aspire: interrupted, 2 prompts unfinished\n"


def test_compare_runs_every_policy_on_the_same_prompts(model: str, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: each policy compared with itself."""
    (tmp_path / "prompts").write_text("one two three\nfour\n")
    words = ["bench", "compare", model, "--prompt-file", str(tmp_path / "prompts"), "--max-tokens", "10", *SMALL]
    assert run([*words, "--policies", "autoregressive,synchronized-pillar,delta", "--policy-overrides",
                '{"sinks": 0, "budget": 16, "window": 8, "unit": 4}', "--block-size", "4"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    plain, pillar, delta = result["policies"]
    assert [one["tokens"] for one in (plain, pillar, delta)] == [20, 20, 20]
    assert plain["drafted"] == 0
    assert pillar["drafted"] > 0
    assert plain["equal"]
    assert pillar["equal"]
    assert pillar["steps"] > 0


def test_chat_remembers_and_forgets(model: str, capsys: pytest.CaptureFixture[str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the answer left out of the next turn's prompt."""
    lines = iter(["Hi", "", "again", "/reset", "Hello", "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    seen: list[list[str]] = []
    render = LLM.render_chat

    def remember(llm: LLM, messages: list[dict[str, str]]) -> list[int]:
        seen.append([f"{message['role']}: {message['content']}" for message in messages])
        return render(llm, messages)

    monkeypatch.setattr(LLM, "render_chat", remember)
    assert run(["chat", model, "--system", "Be brief.", "--max-tokens", "4", "--temperature", "0", "--max-model-len",
                "512"]) == 0
    first, second, third = seen
    answer = capsys.readouterr().out.split("\n")[0]
    assert first == ["system: Be brief.", "user: Hi"]
    assert second[:2] == first
    assert second[2].startswith("assistant: ")
    assert second[2].removeprefix("assistant: ").split("\n")[0] == answer
    assert second[3:] == ["user: again"]
    assert third == ["system: Be brief.", "user: Hello"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_a_target(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: a command whose file does not exist."""
    assert callable(_load(COMMANDS[name]))
    assert run([*name.split(), "--help"]) == 0
    assert f"aspire {name}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], [], ["bench"]])
def test_overview_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: `aspire` alone ended with an error."""
    assert run(arguments) == 0
    out = capsys.readouterr().out
    wanted = [name for name in COMMANDS if name.startswith("bench ") == (arguments == ["bench"])]
    assert all(name.removeprefix("bench ") in out for name in wanted)


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: status 1."""
    status = run(["generat"])
    assert refused(status, capsys.readouterr().err)


def test_engine_flags_are_engine_options() -> None:
    """Planted fault: a flag that no part of EngineConfig has. The seed of `generate` belongs to the sampling."""
    assert {flag.name for flag in ENGINE_FLAGS} <= set(EngineOptions.__annotations__)
    assert {flag.name for flag in SAMPLING_FLAGS} <= set(SamplingParams.__dataclass_fields__)
    missing = set(EngineOptions.__annotations__) - {flag.name for flag in ENGINE_FLAGS}
    assert missing == {"seed", "served_model_name"}


def test_help_is_quick() -> None:
    """Planted fault: torch imported by main.py. The best of three runs, since the machine may be busy."""
    def seconds() -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import sys\nfrom aspire.cli.main import run\nrun(['--help'])\n"
                        "assert 'torch' not in sys.modules"], check=True, capture_output=True,
                       env={"PYTHONPATH": str(Path(generate_module.__file__).parents[2])})
        return time.perf_counter() - begun

    assert min(seconds() for _ in range(3)) < 3


@pytest.mark.parametrize(("line", "named"), [("{}", "line 1"), ("[", "line 1"), ("3", "line 1"), (None, "data")])
def test_acceptance_refuses_data_it_cannot_read(line: str | None, named: str, model: str, tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: TypeError for a number."""
    path = tmp_path / "data.jsonl"
    if line is not None:
        path.write_text(line + "\n")
    status = run(["bench", "acceptance", model, "--data", str(path)])
    error = capsys.readouterr().err
    assert refused(status, error), error
    assert named in error
