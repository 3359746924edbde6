"""`aspire calibrate` on a tiny random model: the file it writes is the one that engines use."""

import json
import time
from pathlib import Path

import pytest

from aspire.cli.main import run
from aspire.llm import LLM
from aspire.request import SamplingParams
from aspire.speculation.calibration import load_calibration
from aspire.speculation.policy import Overrides
from aspire.testing.models import tiny_model

WORDS = ["--batch", "3", "--context", "100", "--requests", "2", "--budget", "24", "--budget", "80", "--drafts", "4",
         "--block-size", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=5))


def test_engines_find_and_use_the_calibration(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Written to the cache, found there by commands, used for layers, budget and price, and output stays the same.
    Planted faults: the calibrated cost not handed to the scheduler; overrides ignored; the lists never looked at."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["calibrate", model, *WORDS, "--max-minutes", "0.2"]) == 0
    entry = json.loads(capsys.readouterr().out.splitlines()[-1])
    path = Path(entry["file"])
    assert path.parent == tmp_path / "aspire" / "calibration"
    found = load_calibration(path)
    assert list(found.refresh) == entry["refresh"]
    assert found.budget in (24, 80)
    finalists = [one for one in found.measured if one["final"]]
    best = max(finalists or found.measured, key=lambda one: one["tokens_per_second"])
    assert (tuple(best["refresh"]), best["budget"]) == (found.refresh, found.budget)
    assert best["tokens_per_second"] == found.tokens_per_second > 0
    assert found.agreement is not None
    assert len(found.agreement["shared"]) == len(found.agreement["kept"]) == len(found.agreement["layers"]) == 5
    assert found.base + found.weights + found.per_token + found.per_byte > 0

    options = {"max_model_len": 256, "max_num_seqs": 2, "block_size": 8}
    llm = LLM(model, calibration=str(path.parent), **options)  # type: ignore[arg-type]
    assert llm.engine.scheduler.cost.fitted
    assert llm.engine.scheduler.cost.per_byte == found.per_byte
    layers = llm.engine.loop.runner.setup.layers  # type: ignore[attr-defined]
    assert tuple(layer for layer, writes in enumerate(layers.draft_writes) if writes) == found.refresh
    assert llm.engine.scheduler.cost.kv.selection.budget == found.budget
    given = LLM(model, calibration=str(path), overrides=Overrides(refresh=(2,)), **options)  # type: ignore[arg-type]
    layers = given.engine.loop.runner.setup.layers  # type: ignore[attr-defined]
    assert layers.full_layers == (2,)

    words = ["generate", model, "--prompt", "one two three " * 9, "--max-tokens", "30", "--ignore-eos", "--json",
             "--max-model-len", "256", "--max-num-seqs", "2"]
    texts = []
    for more in ([], ["--calibration", "off"], ["--policy", "autoregressive"]):
        assert run([*words, *more]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1] == texts[2]
    sampling = SamplingParams(max_tokens=5, temperature=0.0)
    assert len(llm.generate([[1, 2, 3]], sampling, use_tqdm=False)[0].outputs[0].token_ids) == 5


def test_the_time_is_bounded_and_something_is_chosen(model: str, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """Next to no time: one candidate, the preset's own layers. Planted fault: the clock looked at after a size
    only."""
    path = tmp_path / "cal.json"
    begun = time.monotonic()
    assert run(["calibrate", model, *WORDS, "--max-minutes", "0.01", "--output", str(path)]) == 0
    assert time.monotonic() - begun < 60
    entry = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not entry["complete"]
    assert len(load_calibration(path).measured) == 1
    assert entry["refresh"] == [3]


@pytest.mark.parametrize(("words", "named"), [
    (["--output", "/proc/none/x.json"], "output"), (["--context", "600"], "limit"), (["--data", "/nowhere"], "data")])
def test_what_the_command_refuses(words: list[str], named: str, model: str,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", model, *WORDS, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aspire: error: ")
    assert named in error


def test_a_missing_calibration_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: plain defaults, without a word."""
    assert run(["generate", model, "--prompt", "x", "--calibration", "/nowhere.json"]) == 2
    assert "calibration" in capsys.readouterr().err
