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


def test_flags_of_the_vllm_benchmark(serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Planted fault: of several values after a flag, the last one alone counted."""
    server = serve(FakeEngine(step_seconds=0.002))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": word * 20}) + "\n" for word in "abcdef"))
    status = run(["bench", "serve", "--backend", "vllm", "--base-url", server.url, "--endpoint", "/v1/completions",
                  "--served-model-name", "fake", "--dataset-name", "custom", "--dataset-path",
                  str(tmp_path / "prompts.jsonl"), "--custom-output-len", "9", "--num-prompts", "6", "--goodput",
                  "e2el:0.001", "ttft:10000", "--label", "mine", "--metadata", "gpu=none", "run=2", "--extra-body",
                  '{"return_token_ids": true}', "--save-result", "--save-detailed", "--result-dir", str(tmp_path),
                  "--result-filename", "r.json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == 6
    assert result["request_goodput"] == 0, "no request ends within a microsecond"
    assert (result["label"], result["gpu"], result["run"]) == ("mine", "none", "2")
    assert result["output_lens"] == [9] * 6
    assert sorted(text[0] for text in result["generated_texts"]) == [*"abcdef"]
    assert "ttfts" not in json.loads(captured.out.splitlines()[-1])
    for options, text in ((["--metadata", "x"], "metadata"), (["--extra-body", "[]"], "extra_body")):
        assert run(["bench", "serve", "--base-url", server.url, *options]) == 2
        assert text in capsys.readouterr().err


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
