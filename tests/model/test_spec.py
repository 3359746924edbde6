"""Configs to specs: limits, lists of layers, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aspire.model.build import describe_model
from aspire.model.layout import checkpoint_parts, parameter_shapes
from aspire.model.resolve import resolve_model
from aspire.model.spec import ModelSpec
from aspire.testing.models import family_configs, tiny_model


def describe(path: Path, max_model_len: int | None = None, **fields: Any) -> ModelSpec:
    family = fields.pop("family", "llama")
    return describe_model(resolve_model(str(tiny_model(path, family, **fields))), max_model_len=max_model_len)


def test_windows_and_ropes_of_layers(tmp_path: Path) -> None:
    """Planted fault: Gemma 3's local layers on the global frequencies."""
    spec = describe(tmp_path, family="gemma3")
    assert spec.windows == (24, 24, None, 24, 24, None)
    assert [layer.rope for layer in spec.layers] == [1, 1, 0, 1, 1, 0]
    assert [rope.theta for rope in spec.ropes] == [1e6, 1e4]
    assert [rope.kind for rope in spec.ropes] == ["linear", "default"]
    assert describe(tmp_path, family="qwen2").windows == (None, None, 24, 24)
    assert [layer.rope for layer in describe(tmp_path, family="smollm3").layers] == [0, 0, None, 0]
    assert [layer.moe for layer in describe(tmp_path, family="qwen3_moe").layers] == [True, False, True, True]


@pytest.mark.parametrize(("scaling", "limit"), [
    (None, 512), ({"rope_type": "linear", "factor": 2.0}, 1024), ({"rope_type": "dynamic", "factor": 3.0}, 1536),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 64}, 512),
], ids=lambda value: str(value.get("rope_type")) if isinstance(value, dict) else str(value))
def test_longest_sequence(scaling: dict[str, Any] | None, limit: int, tmp_path: Path) -> None:
    """vLLM's rule. Planted fault: llama3 multiplied by its factor."""
    assert describe(tmp_path, rope_scaling=scaling).max_model_len == limit
    assert describe(tmp_path, rope_scaling=scaling, max_model_len=10).max_model_len == 10
    with pytest.raises(ValueError, match=f"max_model_len must be in \\[1, {limit}\\].*got {limit + 1}"):
        describe(tmp_path, rope_scaling=scaling, max_model_len=limit + 1)


def test_refusals(tmp_path: Path) -> None:
    """Each names what it got and what is allowed. Planted fault: unknown activations fall through to gelu."""
    with pytest.raises(ValueError, match=r"hidden_act must be one of silu.*got 'relu'"):
        describe(tmp_path, hidden_act="relu")
    with pytest.raises(ValueError, match="multiple of num_key_value_heads"):
        describe(tmp_path, num_key_value_heads=4)


@pytest.mark.parametrize("family", list(family_configs()))
def test_parts_tile_the_parameters(family: str, tmp_path: Path) -> None:
    """Every element of every parameter comes from exactly one checkpoint tensor. Planted fault: `up` at row 0."""
    spec = describe(tmp_path, family=family)
    parameters = {name: torch.zeros(shape) for name, shape in parameter_shapes(spec).items()}
    for part in checkpoint_parts(spec).values():
        view = part.slice(parameters)
        assert view.shape == part.shape
        assert view.is_contiguous()
        view += 1
    assert all(bool((tensor == 1).all()) for tensor in parameters.values())
    matrices = sum(tensor.numel() for name, tensor in parameters.items() if tensor.dim() > 1)
    assert spec.num_parameters() == matrices


def test_kv_bytes(tmp_path: Path) -> None:
    """4 layers, keys and values, 2 heads of 8. Planted fault: query heads counted."""
    assert describe(tmp_path).kv_bytes_per_token(2) == 4 * 2 * 2 * 8 * 2
