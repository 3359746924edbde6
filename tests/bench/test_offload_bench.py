"""`aspire bench offload`: its turns, its sums, and that its pretended contexts are pretended once."""

import json
from pathlib import Path
from typing import Any

import pytest

from aspire.bench.offload import Sessions
from aspire.bench.replay import PretendCached
from aspire.cli.main import run
from aspire.testing.models import tiny_model

COMMAND = ["bench", "offload", "--sessions", "3", "--context", "40", "--new-tokens", "24", "--block-size", "4",
           "--kv-offload-gb", "0.02", "--pool", "0.5"]


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run([*COMMAND, *arguments]) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_a_real_model_computes_less_and_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted faults: both runs with the second one's options; follow-ups without the answers before them."""
    found = lines(capsys, "--model", str(tiny_model(tmp_path)), "--policy", "autoregressive", "--policy", "aspire")
    assert [(t["policy"], t["kv_offload_gb"], t["turn"]) for t in found] == [
        (policy, size, turn) for policy in ("autoregressive", "aspire") for size in (0.0, 0.02) for turn in (0, 1)]
    for policy in ("autoregressive", "aspire"):
        plain, kept = ([t for t in found if t["policy"] == policy and t["kv_offload_gb"] == size]
                       for size in (0.0, 0.02))
        assert all(t["equal"] for t in (*plain, *kept))
        assert [t["prompt_tokens"] for t in plain] == [3 * 40, 3 * (40 + 24 + 32)]
        assert plain[1]["computed"] > kept[1]["computed"] + 60
        assert all(t["to_host"] == t["to_device"] == 0 for t in plain)
        assert kept[0]["to_host"] > 0 < kept[1]["to_device"]


def test_noise_is_pretended_in_the_first_turn_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: the second turn's prompts pretended too, which cost nothing then."""
    plain = [t for t in lines(capsys, "--shape", "tiny") if t["kv_offload_gb"] == 0.0]
    assert all(t["equal"] is None for t in plain)
    assert plain[0]["computed"] < 3 * 40
    assert plain[1]["computed"] > 3 * (24 + 32)


def test_who_comes_back_is_honest() -> None:
    """Planted fault: every allocation pretended, so that a preemption cost nothing."""
    pool = PretendCached(20, 4)
    first = pool.allocate("a", list(range(17)), 20)
    assert first is not None
    assert first.num_cached_tokens == 16
    pool.release("a")
    again = pool.allocate("a", list(range(17)), 20)
    assert again is not None
    assert again.num_cached_tokens == 0


def test_a_session_fits_alone() -> None:
    """Planted fault: the share alone decided, and the only session was refused."""
    assert Sessions(1, 100, 28, 2, 0.1, False).num_blocks(16) == 13
    assert Sessions(10, 100, 28, 1, 0.5, False).num_blocks(16) == 45


@pytest.mark.parametrize(("arguments", "message"), [
    (["--shape", "tiny", "--model", "x"], "model must not be given beside shape"),
    (["--loop", "twice"], "loop must be one of auto, plain, overlapped, got 'twice'"),
    (["--shape", "none"], "shape must be one of"), (["--policy", "nope"], "policy must be one of")])
def test_what_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMAND, *arguments]) == 2
    assert message in capsys.readouterr().err
