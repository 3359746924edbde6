"""KV in host memory in whole engines: the same tokens, fewer computed twice, nothing left behind.

Late copies: the engine runs with a lane that does nothing before somebody waits for it, as a slow bus would.
"""

import random
from typing import Any

import pytest
import torch

from aspire.config import EngineConfig, EngineOptions
from aspire.engine import Engine
from aspire.ops.copy_blocks.reference import copy_blocks
from aspire.request import SamplingParams
from aspire.runtime.cache import KVCache, KVShape
from aspire.runtime.host_memory import host_blocks
from aspire.runtime.lanes import InlineLane
from aspire.runtime.offload import BlockMover, Transfer, runs
from aspire.schedule.plan import BlockCopy, BlockUpdate, Direction, Row, RowKind, StepPlan
from aspire.speculation.policy import Overrides
from aspire.testing.engines import TestBed, run, tiny_bed
from aspire.testing.lanes import LateLane
from aspire.testing.move_checks import check_moves

CPU = torch.device("cpu")
TO_HOST, TO_DEVICE = Direction.TO_HOST, Direction.TO_DEVICE
SMALL = {"autoregressive": Overrides(), "aspire": Overrides(budget=32, window=8),
         "aspire-paper": Overrides(budget=64, window=32), "streaming": Overrides(budget=24)}
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=120, ignore_eos=True)
PRESSED: EngineOptions = {"block_size": 8, "num_blocks": 75, "kv_offload_gb": 0.05, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> TestBed:
    return tiny_bed(tmp_path_factory.mktemp("tiny"))


def make_prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(256) for _ in range(length)] for length in (100, 61, 150, 33, 128, 97)]


@pytest.fixture(scope="module")
def expected(bed: TestBed) -> dict[str, list[tuple[int, ...]]]:
    """Plain decoding, one request at a time, nothing shared or offloaded; by type of the cache."""
    plain: EngineOptions = {"policy": "autoregressive", "max_num_seqs": 1, "enable_prefix_caching": False}
    return {dtype: tokens_of(bed.engine({**plain, "kv_cache_dtype": dtype})) for dtype in ("auto", "fp8")}


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in run(engine, make_prompts(), SAMPLED)]


def pressed(bed: TestBed, options: EngineOptions, policy: str = "aspire") -> Engine:
    return bed.engine({**PRESSED, "policy": policy, "overrides": SMALL[policy], **options})


def runner_of(engine: Engine) -> Any:
    return engine.loop.runner


def use_late_lane(engine: Engine) -> LateLane:
    lane = LateLane()
    runner_of(engine).mover._lane = lane
    return lane


def check_left_behind(engine: Engine) -> None:
    pool, offload = engine.scheduler.pool, engine.scheduler.offload
    assert offload is not None
    assert pool.num_free == pool.num_blocks
    assert offload.host.claimants == ()
    offload.host.check()


@pytest.mark.parametrize(("policy", "dtype", "loop", "late"), [
    ("autoregressive", "auto", "plain", True), ("aspire", "auto", "plain", True), ("streaming", "auto", "plain", True),
    ("autoregressive", "auto", "overlapped", True), ("aspire", "auto", "overlapped", True),
    ("aspire-paper", "auto", "overlapped", False), ("aspire", "fp8", "overlapped", True),
    ("autoregressive", "fp8", "plain", False)])
def test_tokens_are_the_same_under_pressure(bed: TestBed, expected: dict[str, list[tuple[int, ...]]], policy: str,
                                            dtype: str, loop: str, late: bool) -> None:
    """Planted faults: no join (late: restored blocks hold what their last owner left, and blocks are written before
    they are copied away); the layers' keys without their values; scatter() before fetch()."""
    engine = pressed(bed, {"kv_cache_dtype": dtype, "loop": loop}, policy)  # type: ignore[typeddict-item]
    if late:
        use_late_lane(engine)
    assert tokens_of(engine) == expected[dtype]
    stats = engine.stats()
    assert stats.num_preemptions > 0, "the pool was not small"
    assert stats.num_restored > 0
    assert stats.num_host_blocks > stats.num_host_blocks_used > 0
    check_left_behind(engine)


@pytest.mark.parametrize(("num_host_blocks", "late"), [(3, False), (3, True), (30, True)])
def test_a_small_host_too(bed: TestBed, expected: dict[str, list[tuple[int, ...]]], num_host_blocks: int,
                          late: bool) -> None:
    """Host blocks change their contents, with copies of the old ones still under way, and lie apart from each other.
    Planted fault: a run of host blocks went on over a gap."""
    shape = KVShape(bed.spec.num_layers, 1, 8, bed.spec.num_kv_heads, bed.spec.head_dim)
    size = shape.bytes_per_block(torch.float32)
    engine = pressed(bed, {"kv_offload_gb": (num_host_blocks + 0.5) * size / (1 << 30)})
    if late:
        use_late_lane(engine)
    assert engine.stats().num_host_blocks == num_host_blocks
    assert tokens_of(engine) == expected["auto"]
    check_left_behind(engine)


def test_less_is_computed_than_without(bed: TestBed) -> None:
    """Planted fault: the engine's scheduler without its Offload."""
    computed = []
    for gibibytes in (0.0, 0.05):
        engine = pressed(bed, {"kv_offload_gb": gibibytes}, "autoregressive")
        tokens_of(engine)
        assert engine.stats().num_preemptions > 2
        computed.append(engine.stats().num_prompt_tokens)
    prompts = sum(map(len, make_prompts()))
    assert computed[1] < prompts + 8 * engine.stats().num_preemptions + 8 < computed[0]


def test_a_forgotten_prompt_comes_back(bed: TestBed) -> None:
    """A prefix that the device has given away is a hit all the same, counted and with the same tokens."""
    engine = pressed(bed, {"num_blocks": 40, "max_num_seqs": 1})
    prompts = make_prompts()
    first = run(engine, [prompts[0]], SAMPLED)[0]
    for other in (prompts[2], prompts[4]):
        run(engine, [other], SAMPLED)
    assert not engine.scheduler.pool.match(prompts[0]), "the device has not forgotten it"
    again = run(engine, [prompts[0]], SAMPLED)[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.metrics is not None
    assert again.metrics.num_cached_tokens == 96
    assert engine.stats().num_restored >= 12


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_aborts_leave_nothing(bed: TestBed, loop: str) -> None:
    """Requests aborted while they wait for their blocks, or while these travel. Planted fault: see the schedule's
    test of the same; here the device's books and the runner's stay in step."""
    engine = pressed(bed, {"loop": loop}, "aspire")  # type: ignore[typeddict-item]
    use_late_lane(engine)
    chance = random.Random(3)
    for index, prompt in enumerate(make_prompts() * 2):
        engine.add(str(index), prompt, SAMPLED)
    live = [str(index) for index in range(12)]
    while engine.has_unfinished:
        done = [output.request_id for output in engine.step() if output.finished]
        live = [name for name in live if name not in done]
        if chance.random() < 0.05 and live:
            engine.abort(live.pop(chance.randrange(len(live))))
        engine.scheduler.check()
    assert engine.stats().num_restored > 0
    check_left_behind(engine)
    runner_of(engine).mover._lane.finish()
    assert tokens_of(engine) == tokens_of(pressed(bed, {"kv_offload_gb": 0.0}))


# -- the mover alone -------------------------------------------------------------------------------------------------


def make_mover(lane: Any, *, capacity: int | None = None) -> tuple[BlockMover, KVCache]:
    cache = KVCache(KVShape(3, 10, 4, 2, 8), dtype=torch.float32, device=CPU)
    for layer, tensor in enumerate((*cache.key, *cache.value)):
        tensor.copy_(100 * layer + torch.arange(10)[:, None, None, None])
    transfer = Transfer(cache, 8, copy_blocks)
    if capacity is not None:
        transfer.capacity = capacity
    return BlockMover(transfer, lane), cache


def contents(cache: KVCache) -> list[int]:
    """What block each block's content once was, checked to be so in every layer."""
    numbers = cache.key[0][:, 0, 0, 0]
    for layer, tensor in enumerate((*cache.key, *cache.value)):
        assert bool((tensor == 100 * layer + numbers[:, None, None, None]).all()), "a block is of one piece"
    return [int(number) for number in numbers]


def plan_of(step: int, *copies: BlockCopy, updates: tuple[BlockUpdate, ...] = (),
            slots: tuple[int, ...] = ()) -> StepPlan:
    rows = tuple(Row(str(slot), slot, RowKind.FULL, 0, 1, 0, True) for slot in slots)
    return StepPlan(step, rows, (), updates, (), copies)


@pytest.mark.parametrize("capacity", [1, 3, None])
@pytest.mark.parametrize("seed", range(20))
def test_many_copies_are_as_one_after_the_other(seed: int, capacity: int | None) -> None:
    """Planted faults: two copies into one block in one bufferful, of which the first won; a run of host blocks that
    went on over a gap; copies to the device first."""
    chance = random.Random(seed)
    mover, cache = make_mover(InlineLane(), capacity=capacity)
    expected, host = list(range(10)), [-1] * 8
    for step in range(6):
        copies = []
        for _ in range(chance.randrange(9)):
            block, host_block = chance.randrange(10), chance.randrange(8)
            direction = TO_HOST if host[host_block] < 0 else chance.choice([TO_HOST, TO_DEVICE])
            copies.append(BlockCopy(block, host_block, direction))
            if direction is TO_HOST:
                host[host_block] = expected[block]
            else:
                expected[block] = host[host_block]
        mover.apply(plan_of(step, *copies))
        assert contents(cache) == expected


@pytest.mark.parametrize("late", [False, True], ids=["inline", "late"])
@pytest.mark.parametrize("seed", range(8))
def test_rows_find_their_blocks_over_random_plans(seed: int, late: bool) -> None:
    """Planted faults: marks of copies to the host left out (late); a slot's need overwritten by its next update."""
    check_moves(lambda device: LateLane() if late else InlineLane(), copy_blocks, device="cpu", seed=seed)


def test_rows_wait_for_what_they_need_and_no_longer() -> None:
    """Planted faults: a mark for all copies of a plan together; a slot's need kept for its next owner."""
    lane = LateLane()
    mover, cache = make_mover(lane, capacity=1)
    away = [BlockCopy(block, block, TO_HOST) for block in (3, 2, 1)]
    mover.apply(plan_of(0, *away, updates=(BlockUpdate(0, 4, (3,)),), slots=(0,)))
    assert lane.settled() == 1, "the row's block was the first to go"
    cache.key[0][3] = cache.value[0][3] = -1.0  # what the row writes
    mover.apply(plan_of(1, updates=(BlockUpdate(1, 0, (7, 8)),), slots=(0, 1)))
    assert lane.settled() == 1, "nobody needs the others"
    back = BlockCopy(9, 3, TO_DEVICE)
    mover.apply(plan_of(2, back, updates=(BlockUpdate(2, 0, (4, 9)),), slots=(0, 1)))
    mover.apply(plan_of(3, updates=(BlockUpdate(2, 0, (5,)),), slots=(0, 2)))
    assert lane.settled() == 1, "slot 2 has a new owner, who needs nothing"
    mover.apply(plan_of(4, updates=(BlockUpdate(0, 5, (9,)),), slots=(0,)))
    assert lane.settled() == 4
    assert cache.key[0][9, 0, 0, 0] == 3, "not what the row wrote into block 3 later"
    assert lane.begun == 2


def test_an_empty_step_moves_its_copies_too(bed: TestBed) -> None:
    """Planted fault: launch() returned for a plan without rows before the mover saw it."""
    engine = pressed(bed, {})
    lane = use_late_lane(engine)
    runner_of(engine).launch(plan_of(0, BlockCopy(0, 0, TO_HOST)), {})
    assert lane.begun == 1


def test_consecutive_host_blocks_cross_in_one_copy() -> None:
    """Planted fault: a run went on over a gap."""
    assert runs([4, 5, 6, 2, 3, 9, 8]) == [(0, 4, 3), (3, 2, 2), (5, 9, 1), (6, 8, 1)]
    assert runs([]) == []


def test_a_bufferful_crosses_in_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables leave from their ends, with host blocks in falling order. Planted fault: a bufferful in the order of the
    plan, each block a copy of its own."""
    mover, _ = make_mover(InlineLane(), capacity=4)
    sent: list[tuple[int, ...]] = []
    monkeypatch.setattr(mover._transfer, "send", lambda host_blocks: sent.append(tuple(host_blocks)))
    mover.apply(plan_of(0, *(BlockCopy(block, block - 2, TO_HOST) for block in (9, 8, 7, 6, 5, 4))))
    assert sent == [(4, 5, 6, 7), (2, 3)]


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    ({"kv_offload_gb": -1.0}, "kv_offload_gb must be a number >= 0"),
    ({"kv_offload_gb": float("nan")}, "kv_offload_gb must be a number >= 0"),
    ({"kv_offload_gb": "8"}, "kv_offload_gb must be a number >= 0"),
    ({"kv_offload_gb": 1.0, "enable_prefix_caching": False}, "kv_offload_gb must be 0 without enable_prefix_caching")])
def test_what_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options("m", options)


def test_sizes_that_cannot_be_had_are_refused_with_numbers() -> None:
    """Planted fault: GiB taken for bytes."""
    assert host_blocks(0.5, 1 << 20) == 512
    with pytest.raises(ValueError, match=r"at least one block of 1048576 bytes \(0.00098 GiB\), got 0.0001"):
        host_blocks(0.0001, 1 << 20)
    with pytest.raises(ValueError, match=r"kv_offload_gb must be at most \d+\.\d, .* got 1000000"):
        host_blocks(1e6, 1 << 20)


def test_where_copying_does_not_pay_it_is_not_done(bed: TestBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the price turned round."""
    monkeypatch.setattr("aspire.runtime.rates.CPU_COPY_RATE", 1e3)
    with pytest.warns(UserWarning, match="kv_offload_gb is not used: a block of .* bytes comes back"):
        engine = pressed(bed, {})
    assert engine.scheduler.offload is None
    assert engine.stats().num_host_blocks == 0
