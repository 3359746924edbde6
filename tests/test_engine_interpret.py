"""The whole engine on the Triton kernels, under Triton's interpreter: tokens equal those of the torch references."""

import random

import pytest
import torch

from aspire.config import EngineConfig
from aspire.request import SamplingParams
from aspire.speculation.policy import Overrides
from aspire.testing.engines import TestBed, run, tiny_bed

pytestmark = pytest.mark.interpret
SIZES = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16,
         "intermediate_size": 32}
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> TestBed:
    return tiny_bed(tmp_path_factory.mktemp("tiny"), "llama", **SIZES)


def make_prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(256) for _ in range(length)] for length in (90, 41, 70)]


@pytest.mark.parametrize(("policy", "overrides"), [
    ("aspire", Overrides(budget=24, window=8, refresh=(1,))), ("aspire-paper", Overrides(budget=32, window=16)),
    ("aspire", Overrides(budget=24, window=8, refresh=(1,), refresh_every=2)),
    ("streaming", Overrides(budget=24))], ids=lambda value: value if isinstance(value, str) else "")
def test_kernels_in_the_engine(bed: TestBed, policy: str, overrides: Overrides) -> None:
    """Planted fault: the judge's kernel accepting one draft too many."""
    from aspire.attention.triton import TritonAttention
    from aspire.build import assemble
    from aspire.model.ops_triton import triton_ops
    from aspire.runtime.devices import DeviceKit
    from aspire.runtime.operators import triton_operators

    expected = run(bed.engine({"policy": "autoregressive"}), make_prompts(), PARAMS)
    config = EngineConfig.from_options(bed.name, {"policy": policy, "overrides": overrides, "max_num_seqs": 3,
                                                  "max_num_batched_tokens": 64, "loop": "overlapped"})
    config = config.resolve(device="cpu", model_dtype="float32", model_limit=bed.spec.max_model_len)
    kit = DeviceKit(TritonAttention(), triton_operators(), triton_ops())
    engine = assemble(config, bed.spec, bed.model, bed.tokenizer, device=torch.device("cpu"), kit=kit)
    outputs = run(engine, make_prompts(), PARAMS)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert all(o.metrics is not None and o.metrics.num_drafted > 0 for o in outputs)
