"""build_engine: from an EngineConfig to a running Engine. The one place that knows every part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aspire.attention.rows import AttentionOptions
from aspire.config import KV_DTYPES, EngineConfig
from aspire.engine import Engine, ModelFacts
from aspire.loop import OverlappedLoop, PlainLoop
from aspire.model.build import build_model, describe_model
from aspire.model.resolve import (
    GenerationDefaults,
    ModelSource,
    load_generation_defaults,
    load_tokenizer,
    resolve_model,
)
from aspire.model.spec import ModelSpec
from aspire.pricing import Pricing
from aspire.progress import Progress, no_progress
from aspire.request import SamplingParams
from aspire.runtime.attend import LayerSetup
from aspire.runtime.batch import BatchBuilder, BatchLayout
from aspire.runtime.cache import KVCache, KVShape, Selection, SlotState
from aspire.runtime.devices import DeviceKit, check_kv_dtype, choose_device, device_kit, device_name, pool_blocks
from aspire.runtime.grammars import Constraints, Grammars
from aspire.runtime.host_tier import HostTier, host_tier
from aspire.runtime.judges import Judge, RejectionJudge, SharedNoiseJudge
from aspire.runtime.operators import Operators
from aspire.runtime.runner import Model, Runner
from aspire.runtime.sampling import Mode, SlotSampling
from aspire.sampling.pipeline import LogitsPipeline
from aspire.schedule.blocks import BlockPool
from aspire.schedule.config import SchedulerConfig
from aspire.schedule.offload import Offload
from aspire.schedule.scheduler import Scheduler
from aspire.speculation.calibration import Calibration, CalibrationKey, find_calibration
from aspire.speculation.cost import CostModel, kv_shape, nominal
from aspire.speculation.cost import KvShape as KvReads
from aspire.speculation.online_fit import OnlineFit
from aspire.speculation.policy import Policy, resolve_policy
from aspire.stats import Observer

MOST_GRAPH_TOKENS = 1024  # of a step with a CUDA graph: enough to verify 60 requests at once; logits take memory


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its device, from which engines are assembled; `config` is resolved. defaults: the model's own
    generation parameters."""

    config: EngineConfig
    spec: ModelSpec
    model: Model
    tokenizer: Any
    device: torch.device
    kit: DeviceKit
    defaults: SamplingParams


def build_engine(config: EngineConfig, *, observers: Sequence[Observer], progress: Progress) -> Engine:
    """Load the model and wire an engine. Raises ValueError for what a user can get wrong, before weights are read
    where possible."""
    loaded = load(config, progress=progress)
    return assemble(loaded.config, loaded.spec, loaded.model, loaded.tokenizer, device=loaded.device, kit=loaded.kit,
                    observers=observers, progress=progress, defaults=loaded.defaults)


def load(config: EngineConfig, *, progress: Progress = no_progress) -> Loaded:
    """Find the model, resolve the config by it, read the weights. Raises ValueError as `build_engine` does."""
    source = resolve_model(config.model.model, revision=config.model.revision, cache_dir=config.model.download_dir,
                           load_format=config.model.load_format, hf_overrides=config.model.hf_overrides)
    device = choose_device(config.model.device)
    spec = describe_model(source)
    for token in spec.eos_token_ids:
        if not isinstance(token, int) or not 0 <= token < spec.vocab_size:
            raise ValueError(f"eos_token_id of {source.name} must be in [0, {spec.vocab_size}), got {token!r}")
    config = config.resolve(device=device.type, model_dtype=spec.dtype, model_limit=spec.max_model_len)
    tokenizer = _tokenizer(config, source)
    with progress("Loading weights", 1000) as advance:
        shown = 0

        def report(done: int, total: int) -> None:
            nonlocal shown
            reached = 1000 * done // max(1, total)
            advance(reached - shown)
            shown = reached

        kit = _kit(config, device)
        model, spec = build_model(source, dtype=getattr(torch, config.model.dtype), device=device, ops=kit.model_ops,
                                  max_model_len=config.model.max_model_len, progress=report)
    return Loaded(config, spec, model, tokenizer, device, kit,
                  _default_params(config, load_generation_defaults(source)))


def _tokenizer(config: EngineConfig, source: ModelSource) -> Any:
    if config.model.tokenizer is None:
        return None if source.kind == "dummy" and not _has_tokenizer(source) else load_tokenizer(source)
    return load_tokenizer(resolve_model(config.model.tokenizer, revision=config.model.revision,
                                        cache_dir=config.model.download_dir, load_format="dummy"))


def _has_tokenizer(source: ModelSource) -> bool:
    return source.path.is_file() or (source.path / "tokenizer_config.json").is_file()


def _default_params(config: EngineConfig, defaults: GenerationDefaults) -> SamplingParams:
    """What `generate` uses when the caller gives no params: the model's own defaults, as vLLM takes them."""
    if config.model.generation_config == "vllm":
        return SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: getattr(defaults, name) for name in names if getattr(defaults, name) is not None}
    if defaults.max_new_tokens is not None:
        given["max_tokens"] = defaults.max_new_tokens
    return SamplingParams(**given)


def assemble(config: EngineConfig, spec: ModelSpec, model: Model, tokenizer: Any, *, device: torch.device,
             kit: DeviceKit | None = None, observers: Sequence[Observer] = (), progress: Progress = no_progress,
             defaults: SamplingParams | None = None, pool_type: type[BlockPool] = BlockPool,
             policy: Policy | None = None, wrap_judge: Callable[[Judge], Judge] = lambda judge: judge) -> Engine:
    """Wire an engine around a model that is already on its device; `config` is resolved.

    policy: instead of the preset that the config names. wrap_judge, pool_type: seams of tests and benchmarks around
    verdicts and blocks.
    """
    kit = kit or _kit(config, device)
    calibration = None
    if policy is None:
        calibration = find_calibration(config.speculation.calibration, calibration_key(config, spec, device))
        policy = _policy(config, spec, calibration)
    lookahead = policy.draft_limit + 1
    loop_type = OverlappedLoop if config.batch.loop == "overlapped" else PlainLoop
    if loop_type is OverlappedLoop:
        lookahead *= 2
    shape = _kv_shape(config, spec, lookahead, device)
    setup, state, sampling = _device_state(config, spec, policy, shape, kit, lookahead=lookahead, device=device)
    kv = kv_reads(config, spec, policy)
    cost = nominal(kv) if calibration is None else calibration.cost(kv)
    tier = _host_tier(config, spec, setup, cost)
    pipeline = LogitsPipeline(config.batch.max_num_seqs, spec.vocab_size, eos_token_ids=spec.eos_token_ids,
                              tokenizer=tokenizer, device=device)
    constraints = Constraints(tokenizer, spec.vocab_size, spec.eos_token_ids)
    grammars = Grammars(config.batch.max_num_seqs, spec.vocab_size, constraints)
    runner = Runner(model, setup, state=state, sampling=sampling, pipeline=pipeline, grammars=grammars,
                    judge=wrap_judge(_judge(config, spec, state, sampling, setup.operators)),
                    builder=BatchBuilder(_layout(policy, state), device=device),
                    mover=None if tier is None else tier.mover)
    uses_graphs = device.type == "cuda" and config.model.cuda_graphs and kit.backend.captures
    if uses_graphs:
        _capture(config, policy, runner, lookahead=lookahead, progress=progress)
    scheduler = _scheduler(config, policy, shape, pool_type, lookahead=lookahead, cost=cost,
                           offload=None if tier is None else tier.offload,
                           most_decode_tokens=_graph_tokens(config, policy) if uses_graphs else float("inf"))
    facts = ModelFacts(
        name=config.model.served_model_name or config.model.model, vocab_size=spec.vocab_size,
        max_model_len=_limit(config), eos_token_ids=spec.eos_token_ids, tokenizer=tokenizer,
        default_params=defaults or SamplingParams())
    pricing = Pricing(scheduler, OnlineFit(scheduler.cost)) if device.type == "cuda" else None
    return Engine(config, facts, scheduler, loop_type(scheduler, runner), checks=(pipeline.check, constraints.check),
                  pricing=pricing, observers=observers)


def _kit(config: EngineConfig, device: torch.device) -> DeviceKit:
    return device_kit(device, batch_invariant=config.model.batch_invariant,
                      attention_backend=config.model.attention_backend)


def calibration_key(config: EngineConfig, spec: ModelSpec, device: torch.device) -> CalibrationKey:
    """What a calibration of this model on this machine is filed under; `config` is resolved."""
    kv_dtype = KV_DTYPES[config.cache.kv_cache_dtype]
    return CalibrationKey(config.model.model, device_name(device), config.model.dtype,
                          (spec.num_layers, spec.num_kv_heads, spec.head_dim), config.parallel.tensor_parallel_size,
                          None if kv_dtype == config.model.dtype else kv_dtype)


def kv_reads(config: EngineConfig, spec: ModelSpec, policy: Policy) -> KvReads:
    """What rows read under a policy; `config` is resolved."""
    size = 2 * spec.num_kv_heads * spec.head_dim * _kv_dtype(config).itemsize
    return kv_shape(policy.layers, policy.selection, size, spec.windows)


def _kv_dtype(config: EngineConfig) -> torch.dtype:
    dtype = getattr(torch, KV_DTYPES[config.cache.kv_cache_dtype])
    assert isinstance(dtype, torch.dtype), "torch names it so"
    return dtype


def _policy(config: EngineConfig, spec: ModelSpec, calibration: Calibration | None) -> Policy:
    chosen = config.speculation
    overrides = chosen.overrides if calibration is None else calibration.overrides(chosen.policy, chosen.overrides)
    return resolve_policy(chosen.policy, spec.num_layers, spec.windows, overrides)


def _limit(config: EngineConfig) -> int:
    assert config.model.max_model_len is not None, "the config is resolved"
    return config.model.max_model_len


def _graph_tokens(config: EngineConfig, policy: Policy) -> int:
    """Tokens of the largest step that has a CUDA graph."""
    rows = config.batch.max_num_seqs
    return min(rows * (policy.draft_limit + 1), config.batch.max_num_batched_tokens, max(MOST_GRAPH_TOKENS, rows))


def _capture(config: EngineConfig, policy: Policy, runner: Runner, *, lookahead: int, progress: Progress) -> None:
    """CUDA graphs of greedy and sampled decoding, before the first request."""
    rows = config.batch.max_num_seqs
    graphs = runner.use_graphs(max_rows=rows, max_tokens=_graph_tokens(config, policy),
                                max_kv_len=_limit(config) + lookahead)
    if config.model.capture_at_start:
        modes: tuple[Mode, ...] = ("greedy", "plain")
        with progress("Capturing CUDA graphs", len(graphs.buckets(modes))) as advance:
            graphs.capture(modes, advance)


def _kv_shape(config: EngineConfig, spec: ModelSpec, lookahead: int, device: torch.device) -> KVShape:
    """The pool: as asked, or as many blocks as all slots can use, up to what memory allows."""
    dtype = _kv_dtype(config)
    check_kv_dtype(dtype, device)
    size = config.cache.block_size
    shape = KVShape(spec.num_layers, 1, size, spec.num_kv_heads, spec.head_dim)
    if config.cache.num_blocks is not None:
        num_blocks = config.cache.num_blocks
    else:
        per_request = -(-(_limit(config) + lookahead) // size)
        num_blocks = pool_blocks(shape, dtype, wanted=config.batch.max_num_seqs * per_request, device=device,
                                 utilization=config.cache.gpu_memory_utilization)
    return KVShape(spec.num_layers, num_blocks, size, spec.num_kv_heads, spec.head_dim)


def _device_state(config: EngineConfig, spec: ModelSpec, policy: Policy, shape: KVShape, kit: DeviceKit, *,
                  lookahead: int, device: torch.device) -> tuple[LayerSetup, SlotState, SlotSampling]:
    slots, limit = config.batch.max_num_seqs, _limit(config)
    scale, dtype = config.cache.kv_scale, _kv_dtype(config)
    selection = Selection(policy.layers, policy.selection, num_slots=slots, max_model_len=limit,
                          block_size=shape.block_size, device=device)
    options = tuple(AttentionOptions(spec.attention_scale, window, spec.attention_softcap, scale, scale)
                    for window in spec.windows)
    setup = LayerSetup(policy.layers, options, KVCache(shape, dtype=dtype, device=device), selection,
                       kit.backend, kit.operators)
    state = SlotState(num_slots=slots, draft_limit=policy.draft_limit, block_size=shape.block_size,
                      blocks_per_slot=-(-(limit + lookahead) // shape.block_size), device=device)
    return setup, state, SlotSampling(slots, device=device)


def _host_tier(config: EngineConfig, spec: ModelSpec, setup: LayerSetup, cost: CostModel) -> HostTier | None:
    return host_tier(config.cache.kv_offload_gb, setup.cache, setup.operators.copy_blocks,
                     num_parameters=spec.num_parameters(), dtype=getattr(torch, config.model.dtype), cost=cost,
                     max_num_seqs=config.batch.max_num_seqs)


def _layout(policy: Policy, state: SlotState) -> BatchLayout:
    speculates = policy.draft_limit > 0 or policy.sparse_emits
    queries = policy.selection.queries or policy.draft_limit + 1
    return BatchLayout(
        draft_limit=policy.draft_limit, scoring_queries=queries if speculates else 0,
        blocks_per_slot=state.block_table.shape[1], scratch_slot=state.scratch,
        scores_drafts=any(policy.layers.draft_writes), refresh_every=policy.layers.refresh_every)


def _judge(config: EngineConfig, spec: ModelSpec, state: SlotState, sampling: SlotSampling,
           operators: Operators) -> Judge:
    if config.speculation.judge == "rejection":
        return RejectionJudge(state, sampling, vocab_size=spec.vocab_size)
    return SharedNoiseJudge(state, sampling, operators)


def _scheduler(config: EngineConfig, policy: Policy, shape: KVShape, pool_type: type[BlockPool], *,
               lookahead: int, cost: CostModel, offload: Offload | None,
               most_decode_tokens: float) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_num_seqs=config.batch.max_num_seqs,
                        max_num_batched_tokens=config.batch.max_num_batched_tokens, max_model_len=_limit(config),
                        block_size=shape.block_size, lookahead=lookahead, sparse_emits=policy.sparse_emits,
                        most_decode_tokens=most_decode_tokens),
        pool_type(shape.num_blocks, shape.block_size, config.cache.enable_prefix_caching), policy.cadence,
        acceptance=policy.new_estimator(), cost=cost, offload=offload)
