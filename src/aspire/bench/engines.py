"""Several engines, one after the other, around one loaded model."""

from collections.abc import Sequence
from typing import Any

import torch

from aspire.build import Loaded, assemble
from aspire.config import EngineConfig, EngineOptions
from aspire.engine import Engine
from aspire.schedule.blocks import BlockPool
from aspire.speculation.policy import Policy
from aspire.stats import Observer


def make_engine(loaded: Loaded, options: EngineOptions, policy: Policy, *, observers: Sequence[Observer] = (),
                predecessor: Engine | None = None) -> Engine:
    """An engine of the loaded model. Graphs are captured when first needed.

    predecessor: an engine with the same options and draft limit that is not used any more. Its KV memory is taken
    over, with the prompts in it: they were computed by full attention, whatever the policy.
    """
    chosen: EngineOptions = {**options, "dtype": loaded.config.model.dtype, "capture_at_start": False,
                             "batch_invariant": loaded.config.model.batch_invariant}
    config = EngineConfig.from_options(loaded.config.model.model, chosen)
    config = config.resolve(device=loaded.device.type, model_dtype=loaded.spec.dtype,
                            model_limit=loaded.spec.max_model_len)

    def same_pool(num_blocks: int, block_size: int, enable_prefix_caching: bool) -> BlockPool:
        assert predecessor is not None, "called for successors only"
        pool = predecessor.scheduler.pool
        assert (pool.num_blocks, pool.block_size) == (num_blocks, block_size), "options differ from the predecessor's"
        return pool

    pool_type: Any = BlockPool if predecessor is None else same_pool
    engine = assemble(config, loaded.spec, loaded.model, loaded.tokenizer, device=loaded.device, kit=loaded.kit,
                      observers=observers, policy=policy, pool_type=pool_type)
    if predecessor is not None:
        # Before anything is captured: a graph would keep the memory that it was captured with.
        mine, theirs = kv_cache(engine), kv_cache(predecessor)
        mine.key[:], mine.value[:] = theirs.key, theirs.value
    return engine


def kv_cache(engine: Engine) -> Any:
    """The runner's KVCache."""
    runner: Any = engine.loop.runner
    return runner.setup.cache


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
