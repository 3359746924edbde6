"""8-bit KV caches: exact among themselves, near the unrounded cache, half the bytes."""

import random
from dataclasses import replace

import pytest
import torch

from aspire.attention.reference import ReferenceAttention
from aspire.build import calibration_key, kv_reads
from aspire.config import EngineConfig, EngineOptions
from aspire.request import SamplingParams
from aspire.runtime.cache import KVCache
from aspire.speculation.policy import Overrides, resolve_policy
from aspire.testing.attention_cases import CaseSpec, RowSpec, make_case
from aspire.testing.attention_checks import relative_error
from aspire.testing.engines import TestBed, loaded_bed, run, tiny_bed
from aspire.testing.models import tiny_model

SMALL = {"aspire": Overrides(budget=32, window=8), "aspire-paper": Overrides(budget=64, window=32),
         "streaming": Overrides(budget=24), "synchronized-pillar": Overrides(budget=32, window=8)}
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
FP8: EngineOptions = {"kv_cache_dtype": "fp8", "kv_scale": 0.125}


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> TestBed:
    return tiny_bed(tmp_path_factory.mktemp("tiny"))


def make_prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(256) for _ in range(length)] for length in (100, 61, 150, 33)]


def tokens_and_cache(bed: TestBed, options: EngineOptions,
                     params: SamplingParams = PARAMS) -> tuple[list[tuple[int, ...]], KVCache]:
    engine = bed.engine({"policy": "autoregressive", "enable_prefix_caching": False, **options})
    outputs = run(engine, make_prompts(), params)
    return [output.outputs[0].token_ids for output in outputs], engine.loop.runner.setup.cache  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", SMALL)
def test_policies_give_the_same_tokens(bed: TestBed, policy: str) -> None:
    """All read the same rounded cache, and rounding does not depend on who stores. Planted fault: no scale in steps
    whose rows have one token each."""
    expected, cache = tokens_and_cache(bed, {**FP8, "max_num_seqs": 1})
    assert cache.key[0].dtype == torch.float8_e4m3fn
    assert tokens_and_cache(bed, {**FP8, "policy": policy, "overrides": SMALL[policy]})[0] == expected
    assert tokens_and_cache(bed, {})[0] != expected, "the cache was not rounded"


def test_reading_everything_accepts_every_draft(bed: TestBed) -> None:
    """Alignment under a rounded cache. Planted fault: sparse rows read the values without their scale."""
    engine = bed.engine({**FP8, "policy": "aspire", "overrides": Overrides(budget=512)})
    for output in run(engine, make_prompts(), PARAMS):
        assert output.metrics is not None
        assert output.metrics.num_drafted > 10
        assert output.metrics.num_accepted == output.metrics.num_drafted


def test_a_scale_that_is_a_power_of_two_changes_the_cache_alone(bed: TestBed) -> None:
    """To the bit in layer 0, whose keys are functions of the prompt; nearly above it, where numbers too small for 8
    bits show. Planted faults: the scale not given to the store (layer 0); not given to attention (the last layer)."""
    one = replace(PARAMS, max_tokens=1)
    fine, coarse = (tokens_and_cache(bed, {"kv_cache_dtype": "fp8", "kv_scale": 2.0 ** -n}, one)[1] for n in (6, 5))
    for ours, theirs in ((fine.key, coarse.key), (fine.value, coarse.value)):
        here, there = ours[0].float(), theirs[0].float()
        normal = there.abs() >= 2.0 ** -5  # not rounded up from below 2 ** -6
        assert int(normal.sum()) > 1000
        assert torch.equal(here[normal], 2 * there[normal])
        here, there = ours[-1].float(), theirs[-1].float()
        assert float((here - 2 * there).norm() / here.norm()) < 0.05


@pytest.mark.parametrize(("size", "scale", "bound"), [(1.0, 1.0, 0.07), (300.0, 4.0, 0.07), (0.01, 0.001, 0.07)])
def test_error_against_an_unrounded_cache(size: float, scale: float, bound: float) -> None:
    """4 significant bits: 2.6 % of a number in the mean, 6.25 % at most, of keys and of values; a fitting scale keeps
    the worst token below 7 % for numbers of any size (the logits' scale undoes it). Planted fault: scale always 1."""
    rows = (RowSpec(150, 5), RowSpec(140, 1, True), RowSpec(77), RowSpec(130, 40))
    case = make_case(CaseSpec(rows, head_dim=64, capacity=64), seed=0)
    case = replace(case, options=replace(case.options, scale=case.options.scale / size),
                   key_cache=case.key_cache * size, value_cache=case.value_cache * size)
    backend = ReferenceAttention()
    scaled = replace(case.options, key_scale=scale, value_scale=scale)
    caches = [torch.zeros(case.key_cache.shape).to(torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.arange(case.key_cache.shape[0] * case.key_cache.shape[1])
    backend.store(case.key_cache.flatten(0, 1), case.value_cache.flatten(0, 1), *caches, slots, scaled)
    args = (case.rows, case.selection)
    out, _ = backend.attend(case.query, *caches, *args, scaled, None)
    expected, _ = backend.attend(case.query, case.key_cache, case.value_cache, *args, case.options, None)
    assert 0.005 < relative_error(out, expected) < bound


def resolved(bed: TestBed, options: EngineOptions) -> EngineConfig:
    return EngineConfig.from_options(bed.name, {"dtype": "bfloat16", **options}).resolve(
        device="cpu", model_dtype="bfloat16", model_limit=bed.spec.max_model_len)


def test_bytes_halve(bed: TestBed) -> None:
    """In the pool, in the price of a step, and a calibration is filed apart. Planted fault: the price by the model's
    dtype."""
    policy = resolve_policy("aspire", bed.spec.num_layers, bed.spec.windows)
    plain, fp8 = resolved(bed, {}), resolved(bed, {"kv_cache_dtype": "fp8"})
    assert kv_reads(fp8, bed.spec, policy).full_bytes(1000) * 2 == kv_reads(plain, bed.spec, policy).full_bytes(1000)
    keys = [calibration_key(config, bed.spec, torch.device("cpu")) for config in (plain, fp8)]
    assert [key.kv_dtype for key in keys] == [None, "float8_e4m3fn"]
    engine = bed.engine({"dtype": "float32", "kv_cache_dtype": "bfloat16"})
    assert engine.loop.runner.setup.cache.value[0].dtype == torch.bfloat16  # type: ignore[attr-defined]


@pytest.mark.parametrize(("options", "message"), [
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype must be one of auto, "), ({"kv_scale": 2.0}, "kv_scale must be 1"),
    ({"kv_cache_dtype": "fp8", "kv_scale": 0.0}, "kv_scale must be a number above 0")])
def test_what_is_refused(options: EngineOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options("m", options)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("policy", SMALL)
def test_policies_give_the_same_tokens_on_a_gpu(policy: str, graphs: bool,
                                                tmp_path_factory: pytest.TempPathFactory) -> None:
    """bfloat16 with batch-invariant kernels."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need compute capability 8.9")
    path = tiny_model(tmp_path_factory.mktemp("tiny"), "llama", hidden_size=256, num_attention_heads=8,
                      num_key_value_heads=2, head_dim=64, intermediate_size=512)
    bed = loaded_bed(str(path), device="cuda", dtype="bfloat16", batch_invariant=True)
    options: EngineOptions = {**FP8, "num_blocks": 400, "cuda_graphs": graphs}
    expected, _ = tokens_and_cache(bed, {**options, "cuda_graphs": False, "loop": "plain", "max_num_seqs": 1})
    assert tokens_and_cache(bed, {**options, "policy": policy, "overrides": SMALL[policy]})[0] == expected
