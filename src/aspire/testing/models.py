"""tiny_model: a small random checkpoint of any family in a local folder, with a byte tokenizer. Needs no network."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aspire.model.families import read_spec
from aspire.model.layout import checkpoint_parts
from aspire.model.resolve import resolve_model

NUM_BYTES = 256
BOS, EOS = 256, 257
VOCAB_SIZE = 258
CHAT_TEMPLATE = ("{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
                 "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")

Sizes = dict[str, Any]  # fields of a HF config.json

_BASE: Sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
                "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
                "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "float32", "bos_token_id": BOS,
                "eos_token_id": EOS, "pad_token_id": EOS, "rope_theta": 10000.0}


def _row(model_type: str, architecture: str, **fields: Any) -> Sizes:
    return {**_BASE, "model_type": model_type, "architectures": [architecture], **fields}


def family_configs() -> dict[str, Sizes]:
    """Name -> a small config that exercises what is particular to the family. Sizes give each layer kind a turn."""
    gemma = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12, "sliding_window": 24,
             "tie_word_embeddings": True}
    longrope = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
    return {
        "llama": _row("llama", "LlamaForCausalLM"),
        "mistral": _row("mistral", "MistralForCausalLM", sliding_window=24),
        "qwen2": _row("qwen2", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=24, max_window_layers=2),
        "qwen3": _row("qwen3", "Qwen3ForCausalLM", head_dim=12),
        "qwen3_moe": _row("qwen3_moe", "Qwen3MoeForCausalLM", num_experts=6, num_experts_per_tok=2,
                          moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[1]),
        "smollm3": _row("smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 1, 0, 1], tie_word_embeddings=True),
        "phi3": _row("phi3", "Phi3ForCausalLM", partial_rotary_factor=1.0, rope_scaling=longrope,
                     original_max_position_embeddings=128),
        "gemma2": _row("gemma2", "Gemma2ForCausalLM", head_dim=12, attn_logit_softcapping=5.0,
                       final_logit_softcapping=3.0, **gemma),
        "gemma3": _row("gemma3_text", "Gemma3ForCausalLM", head_dim=12, num_hidden_layers=6, rope_theta=1e6,
                       rope_local_base_freq=10000.0, sliding_window_pattern=3,
                       rope_scaling={"rope_type": "linear", "factor": 8.0}, **gemma),
    }


def tiny_model(directory: str | Path, family: str = "llama", seed: int = 0, **sizes: Any) -> Path:
    """Writes config.json, model.safetensors and tokenizer files into `directory` (made if absent); returns it.

    family: a key of family_configs(). sizes: fields of the HF config to replace. Token ids 0..255 are bytes, then
    bos 256 and eos 257. Raises ValueError for an unknown family or field.
    """
    configs = family_configs()
    if family not in configs:
        raise ValueError(f"family must be one of {', '.join(configs)}, got {family!r}")
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", {**configs[family], **sizes})
    write_byte_tokenizer(path)
    write_random_weights(path, seed=seed)
    return path


def write_random_weights(path: Path, *, seed: int = 0) -> None:
    """model.safetensors for the config.json in `path`."""
    from safetensors.torch import save_file

    save_file(random_tensors(path, seed=seed), str(path / "model.safetensors"), metadata={"format": "pt"})


def random_tensors(path: Path, *, seed: int = 0) -> dict[str, Tensor]:
    """Checkpoint tensors for the config.json in `path`; values have the size that keeps activations ordinary."""
    spec = read_spec(resolve_model(str(path), load_format="dummy").config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, part in checkpoint_parts(spec).items():
        value = torch.randn(part.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1.0 - spec.norm_offset + 0.1 * value
        elif name.endswith(".bias"):
            value = 0.1 * value
        elif name != "model.embed_tokens.weight":
            value = value / part.shape[-1] ** 0.5
        tensors[name] = value.to(getattr(torch, spec.dtype))
    return tensors


def write_byte_tokenizer(path: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a tokenizer whose ids are the bytes, for AutoTokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    characters = _byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(path / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>",
        "clean_up_tokenization_spaces": False, "model_max_length": 1 << 30, "chat_template": CHAT_TEMPLATE})


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


def _write_json(path: Path, value: Sizes) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
