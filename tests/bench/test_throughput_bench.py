"""`aspire bench throughput --model`: tokens of all policies compared on real text."""

import json
from pathlib import Path
from typing import Any

import pytest

from aspire.bench.throughput import Bench
from aspire.cli.main import run
from aspire.testing.models import tiny_model

COMMAND = ["bench", "throughput", "--batch", "2", "--context", "60", "--new-tokens", "24"]


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run([*COMMAND, *arguments]) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_tokens_are_compared_with_the_first_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal as they are; one less when a request of the second run says something else. Planted faults: requests
    counted, not their tokens; each policy compared with itself, or with the one before."""
    model = str(tiny_model(tmp_path))
    assert [line["equal"] for line in lines(capsys, "--model", model)] == [None, 2]
    engine = Bench.engine

    def other_prompt(self: Bench, policy: str, *args: Any) -> Any:
        made = engine(self, policy, *args)
        if policy == "aspire":
            add = made.add
            monkeypatch.setattr(made, "add", lambda name, prompt, params: add(
                name, prompt if name == "0" else [*prompt[:-1], prompt[0]], params))
        return made

    monkeypatch.setattr(Bench, "engine", other_prompt)
    policies = [f"--policy={name}" for name in ("autoregressive", "aspire", "streaming")]
    assert [line["equal"] for line in lines(capsys, "--model", model, *policies)] == [None, 1, 2]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model", "anything", "--replay-acceptance", "0.9"], "replay_acceptance is for shapes without weights"),
    (["--data", "file"], "data needs model")])
def test_what_makes_no_sense_together_is_refused(arguments: list[str], message: str,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: no check."""
    assert run([*COMMAND, *arguments]) == 2
    assert message in capsys.readouterr().err
