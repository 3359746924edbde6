"""KV in host memory on a GPU: copies on a stream of their own, page-locked memory, graphs, bfloat16."""

import random
from collections.abc import Callable

import pytest
import torch

from aspire.config import EngineOptions
from aspire.request import SamplingParams
from aspire.runtime.cache import KVCache, KVShape
from aspire.runtime.lanes import StreamLane
from aspire.runtime.offload import Transfer
from aspire.runtime.rates import compute_seconds, copy_seconds
from aspire.speculation.policy import Overrides
from aspire.testing.engines import TestBed, loaded_bed, run
from aspire.testing.models import tiny_model
from aspire.testing.move_checks import check_moves, nothing

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
         "intermediate_size": 512}
SMALL = {"autoregressive": Overrides(), "aspire": Overrides(budget=64, window=16)}
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=200, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(256) for _ in range(length)] for length in (200, 61, 350, 33, 128, 97, 240, 180)]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> TestBed:
    path = tiny_model(tmp_path_factory.mktemp("tiny"), "llama", **SIZES)
    return loaded_bed(str(path), device="cuda", dtype="bfloat16", batch_invariant=True)


def options(policy: str, kv_dtype: str, *, loop: str = "plain", graphs: bool = False) -> EngineOptions:
    return {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_blocks": 60, "policy": policy, "loop": loop,
            "overrides": SMALL[policy], "kv_cache_dtype": kv_dtype, "cuda_graphs": graphs}  # type: ignore[typeddict-item]


@pytest.fixture(scope="module", params=["auto", "fp8"])
def expected(request: pytest.FixtureRequest, bed: TestBed) -> tuple[str, list[tuple[int, ...]]]:
    """A type of the cache, and plain decoding's tokens with it."""
    if request.param == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need compute capability 8.9")
    engine = bed.engine({**options("autoregressive", request.param), "num_blocks": 400, "max_num_seqs": 1})
    return request.param, [output.outputs[0].token_ids for output in run(engine, make_prompts(), SAMPLED)]


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("policy", SMALL)
def test_tokens_are_the_same_under_pressure(bed: TestBed, expected: tuple[str, list[tuple[int, ...]]], policy: str,
                                            graphs: bool, loop: str) -> None:
    engine = bed.engine({**options(policy, expected[0], loop=loop, graphs=graphs), "kv_offload_gb": 0.1})
    assert engine.scheduler.offload is not None, "on this machine copies do not pay: say so and choose a larger model"
    outputs = run(engine, make_prompts(), SAMPLED)
    assert [output.outputs[0].token_ids for output in outputs] == expected[1]
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_restored > 0
    assert engine.scheduler.pool.num_free == 60


def sleep() -> None:
    torch.cuda._sleep(3_000_000)  # a millisecond or two of the current stream


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("before_rows", "before_copies"), [(nothing, nothing), (sleep, nothing), (nothing, sleep)],
                         ids=["quick", "slow-steps", "slow-copies"])
def test_streams_are_ordered(before_rows: Callable[[], None], before_copies: Callable[[], None], seed: int) -> None:
    """Planted faults, to be seen on a GPU: no wait_stream in begin() (slow steps); no wait_event in join() (slow
    copies)."""
    from aspire.ops.copy_blocks.triton import copy_blocks

    check_moves(StreamLane, copy_blocks, device="cuda", seed=seed, before_rows=before_rows,
                before_copies=before_copies)


def test_memory_is_locked_and_rates_are_plausible() -> None:
    """The price's two figures; their values go into docs/log/offload.md."""
    from aspire.ops.copy_blocks.triton import copy_blocks

    cache = KVCache(KVShape(32, 64, 16, 8, 128), dtype=torch.bfloat16, device=torch.device("cuda"))
    transfer = Transfer(cache, 256, copy_blocks)
    assert transfer._host.is_pinned()
    rate = transfer.block_bytes / copy_seconds(transfer)
    compute = compute_seconds(8_000_000_000, 16, torch.bfloat16, transfer.device)
    print(f"\nfrom host memory {rate / 1e9:.1f} GB/s, a block of 8B computed in {1e6 * compute:.0f} microseconds")
    assert 1e9 < rate < 1e12
    assert 1e-6 < compute < 1.0
