"""`aspire bench acceptance`: its sums against a run done by hand, its engines against fresh ones, its command."""

import json
from pathlib import Path
from typing import Any

import pytest

from aspire.bench.acceptance import Cell, Lab, Round, Tally, Work, tally_cell, tokens_for
from aspire.bench.contexts import Windows, read_problems
from aspire.bench.selections import VARIANTS, find_selections, variant_policy
from aspire.build import Loaded, load
from aspire.cli.main import run
from aspire.config import EngineConfig, EngineOptions
from aspire.samples import gsm8k_sample
from aspire.speculation.cadence import Lockstep
from aspire.speculation.cost import KvShape
from aspire.speculation.policy import Overrides
from aspire.speculation.selection import SelectionConfig
from aspire.stats import RowStats, StepStats
from aspire.testing.models import tiny_model

OPTIONS: EngineOptions = {"block_size": 8}
SMALL = Overrides(budget=24, window=8, sinks=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def loaded(model: str) -> Loaded:
    return load(EngineConfig.from_options(model, {}))


def make_lab(loaded: Loaded, *, lengths: tuple[int, ...] = (87, 71, 79), tokens: int = 24) -> Lab:
    contexts = Windows(gsm8k_sample(), loaded.tokenizer).contexts(len(lengths), max(lengths), seed=3)
    cut = tuple(tuple(one[-length:]) for one, length in zip(contexts, lengths, strict=True))
    return Lab(loaded, Work(cut, 5, tokens), OPTIONS)


def measure(lab: Lab, name: str, *temperatures: float) -> list[Cell]:
    variant = VARIANTS[name]
    policy = lab.policy(variant, SMALL if variant.budgets else Overrides())
    return lab.measure(name, policy, temperatures, budget=24, report=lambda cell: None)


def step(number: int, *rows: RowStats) -> StepStats:
    return StepStats(number, float(number), 1.0, rows, sum(row.num_tokens for row in rows), 0.0, 1, 0)


def test_kv_bytes_follow_the_growing_context() -> None:
    """One request, 100 prompt tokens, 2 listed layers and 1 full one, 10 bytes a token and layer; a stranger's rows
    do not count. Planted fault: the context stays at the prompt's length."""
    shape = KvShape(10, 1, 2, (), SelectionConfig(unit=1, sinks=4, window=4, budget=32))
    tally = Tally({"a": 100}, shape)
    for stats in (step(0, RowStats("a", "prefill", 100, 0, 0, 1)), step(1, RowStats("a", "draft", 1, 0)),
                  step(2, RowStats("b", "draft", 1, 1), RowStats("a", "draft", 1, 1)),
                  step(3, RowStats("a", "verify", 3, 2, 1, 2), RowStats("b", "verify", 3, 2, 2, 3)),
                  step(4, RowStats("a", "verify", 1, 0, 0, 1))):
        tally.on_step(stats)
    drafts = shape.sparse_bytes(101, 0) + shape.sparse_bytes(101, 1)
    assert tally.rounds == {"a": [Round(2, 1, 1, drafts + 10 * 3 * (101 + 2), 10 * 3 * (101 + 102))]}
    assert tally.emitted == {"a": 4}


def test_counts_of_a_cell_by_hand() -> None:
    """Three rounds of 4 drafts and a short one, which does not count. Planted fault: drafts behind a rejected one
    taken for trials (alpha 7/12)."""
    rounds = [Round(4, 4, 1, 30.0, 50.0), Round(4, 1, 6, 30.0, 20.0), Round(4, 2, 1, 30.0, 30.0),
              Round(3, 3, 8, 9.0, 9.0)]
    cell = tally_cell(rounds, selection="x", budget=64, temperature=0.0, draft_length=4, seconds=1.0)
    assert cell.reached == (3, 3, 2, 1)
    assert cell.accepted == (3, 2, 1, 1)
    assert (cell.trials, cell.alpha) == (9, 7 / 9)
    assert cell.survival == (1.0, 2 / 3, 1 / 3, 1 / 3)
    assert cell.tokens_per_verification == 10 / 3
    assert cell.wasted == pytest.approx(5 / 12)
    assert (cell.kv_bytes_per_token, cell.kv_share) == (9.0, 0.9)


@pytest.mark.parametrize(("trials", "requests", "length"), [(2000, 24, 16), (100, 3, 5), (7, 2, 1)])
def test_the_counted_tokens_hold_the_trials(trials: int, requests: int, length: int) -> None:
    """Every round fully accepted is the worst case: length trials for length + 1 tokens; rounds begin below the count.
    Planted fault: one trial per token."""
    tokens = tokens_for(trials, requests, length)
    rounds = len(range(1, tokens, length + 1))
    assert requests * rounds * length >= trials
    assert requests * (tokens - 1) < 3 * trials


def test_full_attention_accepts_every_draft(loaded: Loaded) -> None:
    """Sampled and greedy. Planted fault: drafts' noise taken one position later."""
    for cell in measure(make_lab(loaded), "full", 0.0, 0.8):
        assert cell.alpha == 1.0
        assert cell.wasted == 0.0
        assert cell.tokens_per_verification == 6.0
        assert cell.kv_share == pytest.approx(1.0, abs=0.02)


def test_shared_memory_and_earlier_runs_change_nothing(loaded: Loaded) -> None:
    """A selection measured after others, on contexts that they computed, counts what it counts alone: the tokens after
    the shared blocks hold all scoring queries here. Planted fault: the predecessor's cache not taken over (its pool
    says that the prompts are computed)."""
    lab = make_lab(loaded)
    lab.prefill()
    measure(lab, "streaming", 0.8)
    for name in ("aspire", "pillar"):
        together = measure(lab, name, 0.0, 0.8)
        alone = measure(make_lab(loaded), name, 0.0, 0.8)
        for one, other in zip(together, alone, strict=True):
            assert (one.reached, one.accepted, one.kv_bytes) == (other.reached, other.accepted, other.kv_bytes)
        assert together[0].accepted != together[1].accepted
        assert together[0].alpha < 1.0


def test_every_variant_fits_models_of_any_depth(loaded: Loaded) -> None:
    """Planted fault: a refresh layer at depth 1.0, above which nobody reads."""
    for name, variant in find_selections(["all"]).items():
        policy = variant_policy(variant, loaded.spec, Lockstep(4))
        assert policy.draft_limit == 4, name
        assert policy.lossless, name
    with pytest.raises(ValueError, match="selections must be among"):
        find_selections(["aspire", "aspires"])


class WordTokenizer:
    """One token per word."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


def test_contexts_have_the_asked_length_and_differ() -> None:
    """Each ends in another question. Planted fault: one order of problems for all prompts."""
    contexts: list[list[Any]] = list(Windows(gsm8k_sample(), WordTokenizer()).contexts(3, 500, seed=1))
    assert [len(one) for one in contexts] == [500] * 3
    assert len({tuple(one) for one in contexts}) == len({tuple(one[-20:]) for one in contexts}) == 3
    assert all(one[-1] == "Answer:" for one in contexts)
    assert contexts == Windows(gsm8k_sample(), WordTokenizer()).contexts(3, 500, seed=1)


def test_a_context_longer_than_the_data_is_refused() -> None:
    """Planted fault: a shorter prompt, without a word."""
    with pytest.raises(ValueError, match="context must be at most"):
        Windows(gsm8k_sample(), WordTokenizer()).contexts(1, 100_000, seed=1)


def test_problems_are_read_whatever_their_fields_are_called(tmp_path: Path) -> None:
    """Planted fault: a list of solutions printed as a list."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"problem": "p", "solution": ["s", "t"]}\n{"question": "q", "answer": "2 <<1+1=2>>2"}\n')
    assert [(one.question, one.answer) for one in read_problems(str(path))] == [("p", "s"), ("q", "2 2")]


WORDS = ["--context", "100", "--batch", "2", "--drafts", "5", "--min-trials", "40", "--block-size", "8"]


def test_the_command_reports_every_cell(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted faults: a budget's cells under another's name; the second temperature's pictures over the first's."""
    pytest.importorskip("matplotlib")
    words = ["bench", "acceptance", model, *WORDS, "--budget", "24", "--budget", "40", "--out", str(tmp_path),
             "--selections", "full,streaming,refresh-0", "--policy-overrides", '{"sinks": 0, "window": 8}']
    assert run(words) == 0
    entry = json.loads(capsys.readouterr().out.splitlines()[-1])
    cells = entry["cells"]
    assert [(one["selection"], one["budget"], one["temperature"]) for one in cells] == [
        ("full", None, 0), ("full", None, 0.8),
        *((name, budget, t) for name in ("streaming", "refresh-0") for budget in (24, 40) for t in (0, 0.8))]
    assert all(one["trials"] >= 40 for one in cells)
    assert all(one["alpha"] == 1 for one in cells[:2])
    lists = {one["budget"]: one for one in cells if one["selection"] == "refresh-0" and one["temperature"] == 0}
    assert lists[24]["alpha"] < lists[40]["alpha"] < 1
    assert [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()] == cells
    assert len(list(tmp_path.glob("*.png"))) == 6


@pytest.mark.parametrize(("words", "named"), [
    (["--selections", "best"], "selections"), (["--policy", "aspire"], "policy"),
    (["--policy-overrides", '{"refresh": [99]}', "--selections", "aspire"], "refresh"),
    (["--context", "500"], "limit"), (["--budget", "30", "--selections", "aspire-page16"], "budget")])
def test_what_the_command_refuses(words: list[str], named: str, model: str,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is measured. Planted fault: overrides tried when their turn comes."""
    assert run(["bench", "acceptance", model, *WORDS, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aspire: error: ")
    assert named in error
