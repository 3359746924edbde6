"""Equality: every lossless preset gives exactly the tokens of plain decoding, whatever the schedule."""

import random
from dataclasses import replace

import pytest

from aspire.bench.selections import merge
from aspire.config import EngineOptions
from aspire.request import SamplingParams
from aspire.speculation.policy import Overrides, resolve_policy
from aspire.testing.engines import ScriptedVerdicts, TestBed, run, tiny_bed
from aspire.testing.schedule import RandomCadence

# Budgets far below the contexts of the tests, so that drafts differ from what full attention would pick.
SMALL = {
    "autoregressive": Overrides(),
    "streaming": Overrides(budget=24),
    "pillar": Overrides(budget=32, window=8),
    "aspire-paper": Overrides(budget=64, window=32),
    "aspire": Overrides(budget=32, window=8),
    "synchronized-streaming": Overrides(budget=24),
    "synchronized-pillar": Overrides(budget=32, window=8),
    "synchronized-aspire-paper": Overrides(budget=64, window=32),
    "synchronized-aspire": Overrides(budget=32, window=8),
}
LOSSLESS = tuple(SMALL)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
FILTERED = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, seed=11, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> TestBed:
    return tiny_bed(tmp_path_factory.mktemp("tiny"))


def make_prompts(count: int = 6, *, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    lengths = [100, 61, 150, 33, 128, 97][:count]
    return [[chance.randrange(256) for _ in range(length)] for length in lengths]


def tokens_of(bed: TestBed, params: SamplingParams | list[SamplingParams], options: EngineOptions,
              prompts: list[list[int]] | None = None) -> list[tuple[int, ...]]:
    outputs = run(bed.engine(options), prompts or make_prompts(), params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(bed: TestBed) -> dict[str, list[tuple[int, ...]]]:
    """Plain decoding, one request at a time, nothing shared."""
    plain: EngineOptions = {"policy": "autoregressive", "max_num_seqs": 1, "enable_prefix_caching": False,
                            "max_num_batched_tokens": 512}
    return {name: tokens_of(bed, params, plain)
            for name, params in (("greedy", GREEDY), ("sampled", SAMPLED), ("filtered", FILTERED))}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("policy", LOSSLESS)
def test_preset_equals_plain_decoding(bed: TestBed, expected: dict[str, list[tuple[int, ...]]], policy: str,
                                      params: SamplingParams, request: pytest.FixtureRequest) -> None:
    """Planted fault: the bonus token taken from the first pick instead of the one after the accepted drafts."""
    name = request.node.callspec.id.split("-")[-1]
    options: EngineOptions = {"policy": policy, "overrides": SMALL[policy]}
    assert tokens_of(bed, params, options) == expected["greedy" if params is GREEDY else
                                                       "sampled" if params is SAMPLED else "filtered"], name


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize(("block_size", "num_blocks", "budget"), [(1, 420, 64), (2, 130, 5), (16, 14, 64), (16, 14, 3)])
@pytest.mark.parametrize("policy", ["aspire", "aspire-paper", "streaming", "synchronized-pillar"])
def test_small_pools_and_budgets(bed: TestBed, expected: dict[str, list[tuple[int, ...]]], policy: str,
                                 block_size: int, num_blocks: int, budget: int, loop: str) -> None:
    """Preemption by recompute, chunked prefill, token budgets below a verification (draft limit 16 against 3 and 5).

    Planted fault: a slot admitted with one known token too few.
    """
    options: EngineOptions = {"policy": policy, "overrides": SMALL[policy], "block_size": block_size,
                              "num_blocks": num_blocks, "max_num_batched_tokens": budget,
                              "loop": loop}  # type: ignore[typeddict-item]
    engine = bed.engine(options)
    outputs = run(engine, make_prompts(), SAMPLED)
    assert [output.outputs[0].token_ids for output in outputs] == expected["sampled"]
    if loop == "plain":  # the overlapped loop reserves two rounds, here nearly the whole output
        assert sum(output.metrics.num_preempted for output in outputs if output.metrics) > 0, "the pool was not small"


SELDOM = {
    "aspire": Overrides(refresh_every=3),
    "aspire-own": Overrides(refresh_every=2, between="layer"),
    "aspire-unit": Overrides(refresh_every=2, unit=8),
    "aspire-mix": Overrides(refresh_every=2, merge="mix"),
    "aspire-paper": Overrides(refresh_every=2),
    "synchronized-aspire": Overrides(refresh_every=3, between="layer"),
}


def seldom(name: str) -> EngineOptions:
    """Options of a preset with small lists that are not renewed at every draft."""
    policy = name if name in SMALL else name.split("-")[0]
    return {"policy": policy, "overrides": merge(SMALL[policy], SELDOM[name])}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", list(SELDOM))
def test_lists_seldom_renewed_give_the_same_tokens(bed: TestBed, expected: dict[str, list[tuple[int, ...]]], name: str,
                                                   params: SamplingParams) -> None:
    """Planted fault: rows that do not renew probed all the same (the attention's own check fell)."""
    assert tokens_of(bed, params, seldom(name)) == expected["greedy" if params is GREEDY else "sampled"]


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("name", ["aspire", "aspire-own", "aspire-paper"])
def test_lists_seldom_renewed_survive_preemption(bed: TestBed, expected: dict[str, list[tuple[int, ...]]], name: str,
                                                 loop: str) -> None:
    """Small pools, chunked prefill, prefix hits: no draft before the lists are chosen anew."""
    options: EngineOptions = {**seldom(name), "block_size": 16, "num_blocks": 14, "max_num_batched_tokens": 64,
                              "loop": loop}  # type: ignore[typeddict-item]
    assert tokens_of(bed, SAMPLED, options) == expected["sampled"]


@pytest.mark.parametrize("name", ["aspire", "aspire-own", "aspire-paper"])
def test_lists_seldom_renewed_and_long_enough_reject_nothing(bed: TestBed, name: str) -> None:
    """Alignment: with a budget above the context, drafts see what the target sees in refresh layers, too.

    Planted fault: the tail of rows that do not renew ended one key early.
    """
    options: EngineOptions = {"policy": seldom(name)["policy"], "overrides": merge(SELDOM[name], Overrides(budget=512))}
    for output in run(bed.engine(options), make_prompts(), SAMPLED):
        assert output.metrics is not None
        assert output.metrics.num_drafted > 10
        assert output.metrics.num_accepted == output.metrics.num_drafted


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_and_verdicts(bed: TestBed, expected: dict[str, list[tuple[int, ...]]], seed: int) -> None:
    """Any legal cadence, any (lower) acceptance: the same tokens."""
    policy = resolve_policy("aspire", bed.spec.num_layers, bed.spec.windows, SMALL["aspire"])
    policy = replace(policy, cadence=RandomCadence(draft_limit=5, seed=seed))
    limits = random.Random(seed).choices(range(6), k=17)
    engine = bed.engine({"num_blocks": 40, "loop": "overlapped" if seed % 2 else "plain"}, policy=policy,
                        wrap_judge=lambda judge: ScriptedVerdicts(judge, limits))
    outputs = run(engine, make_prompts(), SAMPLED)
    assert [output.outputs[0].token_ids for output in outputs] == expected["sampled"]


@pytest.mark.parametrize("policy", [p for p in LOSSLESS if p != "autoregressive"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_reading_everything_accepts_every_draft(bed: TestBed, policy: str, params: SamplingParams) -> None:
    """Alignment: with a budget above the context, drafts see what the target sees, so none may be rejected.

    Planted faults, neither of which equality sees: sparse rows that wrote KV one position early (all fell); noise of
    the next position for drafts (the sampled ones fell).
    """
    outputs = run(bed.engine({"policy": policy, "overrides": Overrides(budget=512)}), make_prompts(), params)
    for output in outputs:
        assert output.metrics is not None
        assert output.metrics.num_drafted > 10
        assert output.metrics.num_accepted == output.metrics.num_drafted


def test_small_budgets_reject_some(bed: TestBed) -> None:
    """The equality tests would be empty if sparse drafts never differed from the target."""
    outputs = run(bed.engine({"policy": "aspire", "overrides": SMALL["aspire"]}), make_prompts(), SAMPLED)
    rates = [output.metrics.acceptance_rate for output in outputs if output.metrics]
    assert any(rate is not None and rate < 1.0 for rate in rates)


def test_mixed_params_in_one_batch(bed: TestBed, expected: dict[str, list[tuple[int, ...]]]) -> None:
    """Greedy, sampled and filtered requests beside each other, with different lengths, do not disturb one another."""
    kinds = [("greedy", GREEDY), ("sampled", SAMPLED), ("filtered", FILTERED)] * 2
    params = [replace(one, max_tokens=20 + 4 * i) for i, (_, one) in enumerate(kinds)]
    got = tokens_of(bed, params, {"policy": "aspire", "overrides": SMALL["aspire"], "max_num_seqs": 6})
    for i, (name, _) in enumerate(kinds):
        assert got[i] == expected[name][i][: 20 + 4 * i]


def test_logits_that_are_not_numbers_fail_the_step(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Planted fault: without the check, token 0 was emitted as if the model had chosen it."""
    broken = tiny_bed(tmp_path_factory.mktemp("broken"))
    broken.model.norm.fill_(float("nan"))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="NaN for 0"):
        run(broken.engine({"policy": "aspire"}), make_prompts(1), GREEDY)
