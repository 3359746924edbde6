"""EngineConfig: model + cache + batch + speculation + parallel, each a frozen value with "auto" where it may wait.

Names follow vLLM. `EngineConfig.from_options` builds one from flat keyword options (the Python API, the CLI);
`resolve` replaces every "auto" once the model's facts are known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict

from aspire.speculation.policy import NO_OVERRIDES, PRESET_NAMES, Overrides

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "fp8": "float8_e4m3fn",
             "fp8_e4m3": "float8_e4m3fn"}  # what users write -> torch's name
JUDGES = ("shared-noise", "rejection")
ATTENTION_BACKENDS = ("auto", "triton", "triton+flash", "triton+cudnn", "flashinfer", "reference")


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """model: Hugging Face id, local directory, GGUF file or built-in name. max_model_len: tokens, None: the model's.

    attention_backend: see runtime/devices.py. CUDA only: batch_invariant makes bf16 output token-equal whatever else
    is in the batch; cuda_graphs serves decoding steps from graphs, captured before the first request unless
    capture_at_start is off.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    hf_overrides: Mapping[str, Any] | None = None
    max_model_len: int | None = None
    served_model_name: str | None = None
    generation_config: Literal["auto", "vllm"] = "auto"
    seed: int = 0
    attention_backend: str = "auto"
    batch_invariant: bool = False
    cuda_graphs: bool = True
    capture_at_start: bool = True

    def __post_init__(self) -> None:
        _require(isinstance(self.model, str) and self.model != "", "model", self.model, "a non-empty string")
        _require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        _require(self.max_model_len is None or _is_count(self.max_model_len, 2), "max_model_len", self.max_model_len,
                 "an integer >= 2, or None for the model's limit")
        _require(self.load_format in ("auto", "safetensors", "gguf", "dummy"), "load_format", self.load_format,
                 "one of auto, safetensors, gguf, dummy")
        _require(self.attention_backend in ATTENTION_BACKENDS, "attention_backend", self.attention_backend,
                 f"one of {', '.join(ATTENTION_BACKENDS)}")
        _require(self.generation_config in ("auto", "vllm"), "generation_config", self.generation_config,
                 "auto (the model's generation_config.json) or vllm (neutral defaults)")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """num_blocks: None sizes the pool from free memory (CUDA) or from max_num_seqs and a 4 GiB ceiling (CPU).

    kv_cache_dtype: auto (the model's), or one of KV_DTYPES. kv_scale: what a unit of an 8-bit cache is worth; keys and
    values beyond 448 times it are cut off. kv_offload_gb: GiB of host memory for the blocks of preempted and ended
    requests, which come back from there instead of being computed anew.
    """

    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kv_scale: float = 1.0
    kv_offload_gb: float = 0.0

    def __post_init__(self) -> None:
        _require(_is_count(self.block_size), "block_size", self.block_size, "an integer >= 1")
        _require(self.num_blocks is None or _is_count(self.num_blocks), "num_blocks", self.num_blocks,
                 "an integer >= 1, or None")
        _require(isinstance(self.gpu_memory_utilization, (int, float)) and 0 < self.gpu_memory_utilization <= 1,
                 "gpu_memory_utilization", self.gpu_memory_utilization, "in (0, 1]")
        _require(self.kv_cache_dtype == "auto" or self.kv_cache_dtype in KV_DTYPES, "kv_cache_dtype",
                 self.kv_cache_dtype, f"one of auto, {', '.join(KV_DTYPES)}")
        _require(isinstance(self.kv_scale, (int, float)) and 0 < self.kv_scale < float("inf"), "kv_scale",
                 self.kv_scale, "a number above 0")
        _require(self.kv_scale == 1.0 or self.kv_cache_dtype.startswith("fp8"), "kv_scale", self.kv_scale,
                 "1 unless kv_cache_dtype is fp8")
        _require(isinstance(self.kv_offload_gb, (int, float)) and 0 <= self.kv_offload_gb < float("inf"),
                 "kv_offload_gb", self.kv_offload_gb, "a number >= 0 (GiB)")
        _require(self.kv_offload_gb == 0 or self.enable_prefix_caching, "kv_offload_gb", self.kv_offload_gb,
                 "0 without enable_prefix_caching: what is offloaded is found by its prefix")


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """max_num_batched_tokens: the most tokens of one step, prefill chunks included. loop: see engine.py."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    loop: Literal["auto", "plain", "overlapped"] = "auto"

    def __post_init__(self) -> None:
        _require(_is_count(self.max_num_seqs), "max_num_seqs", self.max_num_seqs, "an integer >= 1")
        _require(_is_count(self.max_num_batched_tokens), "max_num_batched_tokens", self.max_num_batched_tokens,
                 "an integer >= 1")
        _require(self.loop in ("auto", "plain", "overlapped"), "loop", self.loop, "one of auto, plain, overlapped")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """policy: a preset's name. judge: shared-noise keeps tokens equal to plain decoding, rejection only their
    distribution. calibration: a file written by `aspire calibrate`, or a folder of such files, where the one for this
    model and machine is used if there is one. overrides: changes to the preset, and to the calibration."""

    policy: str = "aspire"
    judge: str = "shared-noise"
    calibration: str | None = None
    overrides: Overrides = NO_OVERRIDES

    def __post_init__(self) -> None:
        _require(self.policy in PRESET_NAMES, "policy", self.policy, f"one of {', '.join(PRESET_NAMES)}")
        _require(self.judge in JUDGES, "judge", self.judge, f"one of {', '.join(JUDGES)}")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        _require(self.tensor_parallel_size == 1, "tensor_parallel_size", self.tensor_parallel_size,
                 "1 (more is not implemented yet)")


class EngineOptions(TypedDict, total=False):
    """The flat keyword options of LLM(...) and the CLI; each belongs to one part of EngineConfig."""

    tokenizer: str | None
    revision: str | None
    download_dir: str | None
    dtype: str
    device: str
    load_format: str
    hf_overrides: Mapping[str, Any] | None
    max_model_len: int | None
    served_model_name: str | None
    generation_config: Literal["auto", "vllm"]
    seed: int
    attention_backend: str
    batch_invariant: bool
    cuda_graphs: bool
    capture_at_start: bool
    block_size: int
    num_blocks: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    kv_cache_dtype: str
    kv_scale: float
    kv_offload_gb: float
    max_num_seqs: int
    max_num_batched_tokens: int
    loop: Literal["auto", "plain", "overlapped"]
    policy: str
    judge: str
    calibration: str | None
    overrides: Overrides
    tensor_parallel_size: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @classmethod
    def from_options(cls, model: str, options: EngineOptions) -> "EngineConfig":
        """Sort flat options into their parts. Raises ValueError for a name that no part has."""
        parts = {"model": ModelConfig, "cache": CacheConfig, "batch": BatchConfig, "speculation": SpeculationConfig,
                 "parallel": ParallelConfig}
        homes = {f.name: part for part, kind in parts.items() for f in fields(kind)}  # type: ignore[arg-type]
        unknown = sorted(name for name in options if name not in homes or name == "model")
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; allowed: {', '.join(sorted(set(homes) - {'model'}))}")
        chosen: dict[str, dict[str, Any]] = {part: {} for part in parts}
        for name, value in options.items():
            chosen[homes[name]][name] = value
        return cls(ModelConfig(model, **chosen["model"]), CacheConfig(**chosen["cache"]),
                   BatchConfig(**chosen["batch"]), SpeculationConfig(**chosen["speculation"]),
                   ParallelConfig(**chosen["parallel"]))

    def resolve(self, *, device: str, model_dtype: str, model_limit: int) -> "EngineConfig":
        """A config without "auto": dtypes, device, max_model_len and loop are decided.

        model_dtype: what the checkpoint stores; on the CPU "auto" means float32, where output is token-equal.
        """
        limit = self.model.max_model_len or model_limit
        _require(limit <= model_limit, "max_model_len", limit, f"at most the model's {model_limit}")
        dtype = self.model.dtype
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else ("float16" if model_dtype == "float16" else "bfloat16")
        loop = self.batch.loop
        if loop == "auto":
            loop = "plain" if device == "cpu" else "overlapped"
        kv_dtype = dtype if self.cache.kv_cache_dtype == "auto" else self.cache.kv_cache_dtype
        return replace(self, model=replace(self.model, dtype=dtype, device=device, max_model_len=limit),
                       cache=replace(self.cache, kv_cache_dtype=kv_dtype), batch=replace(self.batch, loop=loop))
