"""Shapes of known models as HF configs, for benchmarks with dummy weights. Facts of the published configs."""

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5,
                          "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                     "max_position_embeddings": 131072, "rope_theta": 500000.0},
    "qwen3-8b": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096,
                 "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
                 "rope_theta": 1e6, "rms_norm_eps": 1e-6, "dtype": "bfloat16", "eos_token_id": 2,
                 "tie_word_embeddings": False},
    "qwen3-1.7b": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048,
                   "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                   "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
                   "eos_token_id": 2, "tie_word_embeddings": True},
    "smollm2-135m": {**_LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                     "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
                     "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True},
    "tiny": {**_LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "rope_theta": 10000.0},
}


def write_shape(name: str, directory: Path) -> Path:
    """config.json of a known shape in `directory`. ValueError for an unknown name."""
    if name not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {name!r}")
    (directory / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return directory
