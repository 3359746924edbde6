"""The engine on CUDA: graphs and the overlapped loop give the tokens of the eager plain loop, and of the CPU."""

import random

import pytest

from aspire.config import EngineOptions
from aspire.request import SamplingParams
from aspire.speculation.policy import Overrides
from aspire.testing.engines import TestBed, loaded_bed, run, tiny_bed
from aspire.testing.models import tiny_model

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
         "intermediate_size": 512}
OVERRIDES = {"aspire": Overrides(budget=64, window=16), "aspire-paper": Overrides(budget=64, window=32),
             "streaming": Overrides(budget=48), "pillar": Overrides(budget=64, window=16),
             "synchronized-aspire": Overrides(budget=64, window=16), "autoregressive": Overrides()}
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=60, ignore_eos=True)
FILTERED = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=7, max_tokens=60, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(256) for _ in range(length)] for length in (200, 61, 350, 33, 128, 97, 240, 180)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TestBed:
    path = tiny_model(tmp_path_factory.mktemp("tiny"), "llama", **SIZES)
    return loaded_bed(str(path), device="cuda", dtype=request.param, batch_invariant=True)


def tokens_of(bed: TestBed, params: SamplingParams, options: EngineOptions) -> list[tuple[int, ...]]:
    chosen: EngineOptions = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_blocks": 400, **options}
    return [output.outputs[0].token_ids for output in run(bed.engine(chosen), make_prompts(), params)]


@pytest.fixture(scope="module")
def expected(bed: TestBed) -> dict[int, list[tuple[int, ...]]]:
    plain: EngineOptions = {"policy": "autoregressive", "loop": "plain", "cuda_graphs": False, "max_num_seqs": 1}
    return {id(params): tokens_of(bed, params, plain) for params in (GREEDY, SAMPLED, FILTERED)}


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("policy", list(OVERRIDES))
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
def test_tokens_equal_plain_decoding(bed: TestBed, expected: dict[int, list[tuple[int, ...]]], params: SamplingParams,
                                     policy: str, graphs: bool, loop: str) -> None:
    """bfloat16 too: with batch-invariant operators a row's bits do not depend on the batch."""
    got = tokens_of(bed, params, {"policy": policy, "overrides": OVERRIDES[policy], "cuda_graphs": graphs,
                                  "loop": loop})  # type: ignore[typeddict-item]
    assert got == expected[id(params)]


@pytest.mark.parametrize("policy", ["aspire", "aspire-paper", "streaming"])
def test_reading_everything_accepts_every_draft(bed: TestBed, policy: str) -> None:
    """Alignment on the device: rounding must not reject what full attention drafted."""
    options: EngineOptions = {"max_num_seqs": 8, "num_blocks": 400, "max_num_batched_tokens": 256, "policy": policy,
                              "overrides": Overrides(budget=512)}
    for output in run(bed.engine(options), make_prompts(), SAMPLED):
        assert output.metrics is not None
        assert output.metrics.num_drafted > 10
        assert output.metrics.num_accepted == output.metrics.num_drafted


@pytest.mark.parametrize("changes", [
    Overrides(budget=64, window=16, refresh_every=2), Overrides(budget=64, window=16, refresh_every=3),
    Overrides(budget=64, window=16, refresh_every=3, between="layer")], ids=["every2", "every3", "every3-own"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_lists_seldom_renewed_give_the_same_tokens(bed: TestBed, expected: dict[int, list[tuple[int, ...]]],
                                                   graphs: bool, changes: Overrides) -> None:
    assert tokens_of(bed, SAMPLED, {"policy": "aspire", "overrides": changes, "cuda_graphs": graphs}
                     ) == expected[id(SAMPLED)]


@pytest.mark.parametrize("every", [1, 3])
def test_seldom_renewed_and_reading_everything_accepts_every_draft(bed: TestBed, every: int) -> None:
    options: EngineOptions = {"max_num_seqs": 8, "num_blocks": 400, "max_num_batched_tokens": 256, "policy": "aspire",
                              "overrides": Overrides(budget=512, refresh_every=every)}
    for output in run(bed.engine(options), make_prompts(), SAMPLED):
        assert output.metrics is not None
        assert output.metrics.num_accepted == output.metrics.num_drafted > 10


def test_small_pool_preempts_and_keeps_tokens(bed: TestBed, expected: dict[int, list[tuple[int, ...]]]) -> None:
    got = tokens_of(bed, SAMPLED, {"policy": "aspire", "overrides": OVERRIDES["aspire"], "num_blocks": 60})
    assert got == expected[id(SAMPLED)]


def test_float32_equals_the_cpu(bed: TestBed, tmp_path_factory: pytest.TempPathFactory,
                                expected: dict[int, list[tuple[int, ...]]]) -> None:
    if bed.dtype != "float32":
        pytest.skip("bfloat16 rounds differently on the CPU")
    cpu = tiny_bed(tmp_path_factory.mktemp("cpu"), "llama", **SIZES)
    outputs = run(cpu.engine({"policy": "autoregressive"}), make_prompts(), SAMPLED)
    assert [output.outputs[0].token_ids for output in outputs] == expected[id(SAMPLED)]
