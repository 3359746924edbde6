"""`aspire bench serve` against a live server with a scripted engine."""

import json
from pathlib import Path

import pytest

from aspire.cli.main import run
from aspire.testing.fake_engine import FakeEngine

from .conftest import Serve


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_run(serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path, backend: str) -> None:
    """Planted fault: counting pieces as tokens."""
    server = serve(FakeEngine(step_seconds=0.004), api_keys=("key",))
    status = run(["bench", "serve", "--base-url", server.url, "--api-key", "key", "--backend", backend,
                  "--num-prompts", "30", "--random-input-len", "20", "--random-output-len", "30", "--request-rate",
                  "200", "--max-concurrency", "8", "--goodput", "ttft:10000", "--save-result",
                  "--result-dir", str(tmp_path), "--result-filename", "r.json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    result = json.loads(captured.out.splitlines()[-1])
    assert (result["completed"], result["failed"]) == (30, 0)
    assert result["total_output_tokens"] == 30 * 30
    assert result["total_input_tokens"] == 30 * 20 or backend == "openai-chat"
    assert result["median_e2el_ms"] > 9 * 4, "ten steps"
    assert result["request_goodput"] == result["request_throughput"]
    assert result["spec_decode_acceptance_rate"] == 100.0
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 30
    server.wait_idle()


def test_wrong_options_and_dead_servers(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve()
    for options, text in ((["--backend", "x"], "backend"), (["--dataset-name", "x"], "dataset_name"),
                          (["--dataset-name", "custom"], "dataset_path"), (["--request-rate", "0"], "rate"),
                          (["--goodput", "ttft"], "goodput"), (["--percentile-metrics", "x"], "metrics"),
                          (["--num-prompts", "0"], "num_prompts"), (["--model", "none"], "404")):
        assert run(["bench", "serve", "--base-url", server.url, "--num-prompts", "2", *options]) == 2
        assert text in capsys.readouterr().err
    assert run(["bench", "serve", "--port", "9", "--ready-check-timeout-sec", "0"]) == 2
    assert "base_url" in capsys.readouterr().err
