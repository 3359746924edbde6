"""The table of families: how to read each architecture's Hugging Face config into a ModelSpec.

A family is a row: its config's model type and a function giving what differs from Llama. Standard library only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aspire.model.spec import DTYPES, LayerSpec, ModelSpec, MoeSpec, RopeSpec

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
               "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_NEEDS = {"linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
               "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}

Config = Any  # a transformers config object: attributes differ by family
Differences = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str
    read: Callable[[Config], Differences]
    text_part: str | None = None  # attribute of the config that holds the language model of a multimodal one


def _windows(config: Config) -> list[int | None]:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def _llama(config: Config) -> Differences:
    return {"qkv_bias": config.attention_bias, "output_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def _mistral(config: Config) -> Differences:
    return {"layers": [LayerSpec(window=config.sliding_window)] * config.num_hidden_layers}


def _qwen2(config: Config) -> Differences:
    return {"qkv_bias": True, "layers": [LayerSpec(window=w) for w in _windows(config)]}


def _qwen3(config: Config) -> Differences:
    return {"qk_norm": True, "qkv_bias": config.attention_bias, "output_bias": config.attention_bias,
            "layers": [LayerSpec(window=w) for w in _windows(config)]}


def _qwen3_moe(config: Config) -> Differences:
    moe = MoeSpec(num_experts=config.num_experts, num_active=config.num_experts_per_tok,
                  intermediate_size=config.moe_intermediate_size, normalize=config.norm_topk_prob)
    layers = [LayerSpec(window=config.sliding_window, moe=index not in config.mlp_only_layers and moe.num_experts > 0
                        and (index + 1) % config.decoder_sparse_step == 0)
              for index in range(config.num_hidden_layers)]
    return {"qk_norm": True, "qkv_bias": config.attention_bias, "output_bias": config.attention_bias, "moe": moe,
            "layers": layers}


def _smollm3(config: Config) -> Differences:
    windows = _windows(config) if config.use_sliding_window else [None] * config.num_hidden_layers
    layers = [LayerSpec(rope=0 if rope else None, window=window)
              for rope, window in zip(config.no_rope_layers, windows, strict=False)]
    return {**_llama(config), "layers": layers}


def _phi3(config: Config) -> Differences:
    return {**_mistral(config), "fused_checkpoint": True}


def _gemma2(config: Config) -> Differences:
    return {"layers": [LayerSpec(window=w) for w in _windows(config)], "qkv_bias": config.attention_bias,
            "output_bias": config.attention_bias, "norm_offset": 1.0, "post_norms": True,
            "activation": ACTIVATIONS.get(config.hidden_activation, config.hidden_activation),
            "attention_scale": config.query_pre_attn_scalar**-0.5, "embedding_scale": config.hidden_size**0.5,
            "attention_softcap": config.attn_logit_softcapping, "logit_softcap": config.final_logit_softcapping}


def _gemma3(config: Config) -> Differences:
    if config.use_bidirectional_attention:
        raise ValueError("config.use_bidirectional_attention must be false for a decoder, got true")
    layers = [LayerSpec(rope=0 if window is None else 1, window=window) for window in _windows(config)]
    ropes = tuple(_rope(config, config.rope_parameters[kind]) for kind in ("full_attention", "sliding_attention"))
    # Whatever the config says, transformers (5.24) and vLLM do not soft-cap Gemma 3's attention.
    return {**_gemma2(config), "layers": layers, "ropes": ropes, "qk_norm": True, "attention_softcap": None}


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama),
    "MistralForCausalLM": Family("mistral", _mistral),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe),
    "SmolLM3ForCausalLM": Family("smollm3", _smollm3),
    "Phi3ForCausalLM": Family("phi3", _phi3),
    "Gemma2ForCausalLM": Family("gemma2", _gemma2),
    "Gemma3ForCausalLM": Family("gemma3_text", _gemma3),
    "Gemma3ForConditionalGeneration": Family("gemma3", _gemma3, text_part="text_config"),
}


def find_family(architectures: "list[str] | None", model_type: str | None) -> tuple[str, Family]:
    """The row for a config's `architectures`, or for its model type when it names none.

    Raises ValueError listing the supported architectures.
    """
    for name in architectures or ():
        if name in FAMILIES:
            return name, FAMILIES[name]
    if not architectures:
        for name, family in FAMILIES.items():
            if family.model_type == model_type:
                return name, family
    asked = ", ".join(architectures or ()) or f"model_type {model_type!r}"
    raise ValueError(f"architecture {asked} is not supported; supported: {', '.join(FAMILIES)}")


def _rope(config: Config, parameters: Mapping[str, Any]) -> RopeSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_KINDS)}, got {kind!r}")
    max_position = config.max_position_embeddings
    original = parameters.get("original_max_position_embeddings")
    if original is None:
        original = getattr(config, "original_max_position_embeddings", None) or max_position
    factor = parameters.get("factor")
    dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    for name in ("short_factor", "long_factor"):
        if kind == "longrope" and len(parameters.get(name) or ()) != dim // 2:
            raise ValueError(f"rope_parameters.{name} must hold {dim // 2} numbers, got {parameters.get(name)!r}")
    needed = _ROPE_NEEDS.get(kind, ())
    for name in needed:
        if parameters.get(name) is None:
            raise ValueError(f"rope_parameters of type {kind!r} need {', '.join(needed)}; {name} is missing")
    optional = {name: parameters[name] for name in (
        "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "attention_factor", "truncate") if parameters.get(name) is not None}
    return RopeSpec(
        kind=kind, theta=float(parameters["rope_theta"]), max_position=max_position, original_max_position=original,
        dim=dim,
        factor=float(max_position / original if factor is None else factor),
        short_factor=tuple(parameters.get("short_factor") or ()),
        long_factor=tuple(parameters.get("long_factor") or ()), **optional)


def _longest(config: Config, rope: RopeSpec) -> int:
    """The longest sequence the model is meant for (vLLM's rule: linear, dynamic and yarn multiply)."""
    if rope.kind in ("linear", "dynamic"):
        return int(rope.max_position * rope.factor)
    if rope.kind == "yarn":
        return int(rope.original_max_position * rope.factor)
    return int(config.max_position_embeddings)


def _as_ids(value: "int | list[int] | None") -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def read_spec(config: Config, *, max_model_len: int | None = None, eos_token_ids: tuple[int, ...] = ()) -> ModelSpec:
    """The spec of a transformers config object.

    max_model_len: shorter than the model's own limit if wanted; it also fixes the frequencies of length-dependent
    ropes. eos_token_ids: further ones, from the generation config.
    Raises ValueError for an unsupported architecture, activation or rope, or a max_model_len beyond the model's.
    """
    name, family = find_family(config.architectures, config.model_type)
    text = getattr(config, family.text_part) if family.text_part else config
    fields = {**_common(text), **family.read(text)}
    fields["layers"] = tuple(fields["layers"])
    fields["dtype"] = _dtype_name(text) or _dtype_name(config) or "float32"
    _check(fields)
    limit = _longest(text, fields["ropes"][0])
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise ValueError(f"max_model_len must be in [1, {limit}] for this model, got {max_model_len}")
    eos = dict.fromkeys((*_as_ids(text.eos_token_id), *_as_ids(getattr(config, "eos_token_id", None)), *eos_token_ids))
    return ModelSpec(architecture=name, max_model_len=max_model_len or limit, eos_token_ids=tuple(eos), **fields)


def _common(config: Config) -> Differences:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    activation = getattr(config, "hidden_act", "silu")
    ropes = () if "full_attention" in config.rope_parameters else (_rope(config, config.rope_parameters),)
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads, "head_dim": head_dim,
        "intermediate_size": config.intermediate_size, "norm_eps": config.rms_norm_eps,
        "attention_scale": head_dim**-0.5, "activation": ACTIVATIONS.get(activation, activation), "ropes": ropes,
        "layers": [LayerSpec()] * config.num_hidden_layers, "tied_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
    }


def _dtype_name(config: Config) -> str | None:
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES else None


def _check(fields: Differences) -> None:
    if fields["activation"] not in ACTIVATIONS.values():
        raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {fields['activation']!r}")
    if fields["num_heads"] % fields["num_kv_heads"]:
        raise ValueError(f"num_attention_heads must be a multiple of num_key_value_heads ({fields['num_kv_heads']}), "
                         f"got {fields['num_heads']}")
