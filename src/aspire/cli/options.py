"""Option groups that several commands share: a command takes one mapping, the command line shows many flags.

Defaults live in EngineConfig and SamplingParams; a flag that was not given is absent from the mapping.
"""

import functools
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from aspire.speculation.policy import Overrides

Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: `name` is the option's name in the mapping, `type` what the command line reads."""

    name: str
    type: Any
    help: str
    metavar: str | None = None
    flag: str | None = None  # spelled otherwise than the name


ENGINE_FLAGS = (
    Flag("policy", str, "Preset of speculation: autoregressive, streaming, pillar, aspire-paper, aspire, delta, "
         "synchronized-*; default aspire", "NAME"),
    Flag("judge", str, "How drafts are judged: shared-noise (same tokens as plain decoding) or rejection", "NAME"),
    Flag("calibration", str, "File that `aspire calibrate` wrote, or a folder of such files, or off; default: the one "
         "for this model and machine in the cache directory", "FILE"),
    Flag("overrides", str, "JSON object of policy fields to change", "JSON", "--policy-overrides"),
    Flag("max_num_seqs", int, "Requests that run at once", "N"),
    Flag("max_model_len", int, "Longest prompt plus output, tokens; default the model's limit", "N"),
    Flag("max_num_batched_tokens", int, "Most tokens of one step", "N"),
    Flag("block_size", int, "Tokens of a KV block", "N"),
    Flag("num_blocks", int, "Blocks of the KV pool; default from free memory", "N"),
    Flag("gpu_memory_utilization", float, "Share of the GPU's memory to use", "SHARE"),
    Flag("enable_prefix_caching", bool, "Share the KV of equal prefixes"),
    Flag("kv_cache_dtype", str, "auto (the model's), float16, bfloat16, or fp8: half the memory, 4 significant bits",
         "NAME"),
    Flag("kv_scale", float, "What a unit of an fp8 cache is worth; default 1", "X"),
    Flag("kv_offload_gb", float, "GiB of host memory for KV of preempted and ended requests; default 0: it is computed "
         "anew", "GIB"),
    Flag("dtype", str, "auto, float32, bfloat16 or float16; auto is float32 on CPU", "NAME"),
    Flag("device", str, "auto, cpu or cuda", "NAME"),
    Flag("load_format", str, "auto, safetensors, gguf or dummy", "NAME"),
    Flag("tokenizer", str, "Tokenizer from elsewhere than the model", "NAME"),
    Flag("revision", str, "Branch, tag or commit on the hub", "NAME"),
    Flag("download_dir", str, "Where downloads are kept", "FOLDER"),
    Flag("hf_overrides", str, "JSON object of config.json fields to change", "JSON"),
    Flag("generation_config", str, "auto: the model's own sampling defaults; vllm: neutral ones", "NAME"),
    Flag("attention_backend", str, "GPU: auto, triton, triton+flash, triton+cudnn, flashinfer or reference; auto is "
         "triton+flash, with --batch-invariant triton", "NAME"),
    Flag("batch_invariant", bool, "GPU: results that do not depend on the batch, so that bfloat16 output is exact too"),
    Flag("cuda_graphs", bool, "GPU: replay decoding steps as graphs"),
    Flag("capture_at_start", bool, "GPU: capture all graphs before the first request"),
    Flag("loop", str, "auto, plain or overlapped", "NAME"),
    Flag("tensor_parallel_size", int, "Devices that share the model", "N"),
)

ADDRESS_FLAGS = (
    Flag("host", str, "Default 127.0.0.1", "ADDRESS"),
    Flag("port", int, "Default 8000", "N"),
)

SAMPLING_FLAGS = (
    Flag("max_tokens", int, "Most tokens of the output; default 256", "N"),
    Flag("min_tokens", int, "Tokens before which the output does not end", "N"),
    Flag("temperature", float, "0 (default) takes the likeliest token", "T"),
    Flag("top_k", int, "Sample among the K likeliest; 0: off", "K"),
    Flag("top_p", float, "Sample among the likeliest that hold this share", "P"),
    Flag("min_p", float, "Least probability, relative to the likeliest", "P"),
    Flag("seed", int, "Seed of the sampling noise", "N"),
    Flag("stop", list[str], "String that ends the output; may be repeated", "TEXT"),
    Flag("stop_token_ids", list[int], "Token id that ends the output; may be repeated", "ID", "--stop-token-id"),
    Flag("ignore_eos", bool, "Go on after the end-of-text token"),
    Flag("n", int, "Outputs per prompt", "N", "-n"),
    Flag("logprobs", int, "Log probabilities of the N likeliest tokens", "N"),
    Flag("presence_penalty", float, "In [-2, 2]", "X"),
    Flag("frequency_penalty", float, "In [-2, 2]", "X"),
    Flag("repetition_penalty", float, "Above 0; 1: off", "X"),
)


def select(flags: tuple[Flag, ...], *names: str) -> tuple[Flag, ...]:
    """Some flags of a group, for a command that shares these."""
    by_name = {flag.name: flag for flag in flags}
    return tuple(by_name[name] for name in names)


def with_flags(**groups: tuple[Flag, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command's parameter, a mapping, be filled from a group of flags; several groups by several parameters."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in groups]
        added = [_parameter(flag) for flags in groups.values() for flag in flags]

        @functools.wraps(command)
        def run(*args: Any, **given: Any) -> None:
            filled = {name: _take(flags, given) for name, flags in groups.items()}
            command(*args, **given, **filled)

        del run.__wrapped__  # type: ignore[attr-defined]  # its signature is not the command line's
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own + added]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(flag: Flag) -> inspect.Parameter:
    names = (flag.flag or "--" + flag.name.replace("_", "-"),)
    if flag.type is bool:
        names = (f"{names[0]}/--no-{names[0][2:]}",)
    kind: Any = flag.type | None
    annotation = Annotated[kind, typer.Option(*names, help=flag.help, metavar=flag.metavar)]
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _take(flags: tuple[Flag, ...], given: Group) -> Group:
    """Move the flags that were set out of `given`."""
    taken = {flag.name: given.pop(flag.name) for flag in flags}
    return {name: value for name, value in taken.items() if value is not None and value != []}


def calibration_folder() -> Path:
    """Where `aspire calibrate` writes and commands look: aspire/calibration in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aspire" / "calibration"


def with_calibration(options: Group) -> Group:
    """Options in which "off" and a calibration not given are resolved. Raises ValueError for a file not there."""
    given = options.get("calibration")
    if given == "off":
        return {**options, "calibration": None}
    if given is None:
        folder = calibration_folder()
        return {**options, "calibration": str(folder)} if folder.is_dir() else options
    if not Path(given).exists():
        raise ValueError(f"calibration must be a file or folder that exists, or off, got {given!r}")
    return options


def read_json_fields(options: Group) -> Group:
    """Engine options with their JSON texts read. Raises ValueError for text that is no JSON object, and for a policy
    field that does not exist."""
    read = dict(options)
    if "hf_overrides" in read:
        read["hf_overrides"] = _json_object("hf_overrides", read["hf_overrides"])
    if "overrides" in read:
        read["overrides"] = _policy_overrides(_json_object("policy_overrides", read["overrides"]))
    return read


def _policy_overrides(chosen: dict[str, Any]) -> Overrides:
    allowed = [field.name for field in fields(Overrides)]
    for name in chosen:
        if name not in allowed:
            raise ValueError(f"policy_overrides must name fields among {', '.join(allowed)}, got {name!r}")
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Overrides).validate_python(chosen)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"policy_overrides.{first['loc'][0]}: {first['msg']}, got {first['input']!r}") from None


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} must be a JSON object, got {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {text!r}")
    return value
