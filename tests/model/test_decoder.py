"""The decoder against transformers: every family, every rope scaling, whole and in chunks, float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM

from aspire.model.build import build_model
from aspire.model.decoder import Decoder
from aspire.model.layers import ModelOps, grouped_gemm, grouped_loop, grouped_masked, mix_experts
from aspire.model.resolve import resolve_model
from aspire.testing.dense import DenseAttention, run_in_chunks
from aspire.testing.models import family_configs, tiny_model

TOLERANCE = 1e-4
SHORT = {"max_position_embeddings": 128}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 5.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

# id, family, config fields, number of tokens
CASES: list[tuple[str, str, dict[str, Any], int]] = [
    *((family, family, {}, 300) for family in family_configs()),
    ("llama-tied-biases", "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, 300),
    ("llama-one-kv-head", "llama", {"num_key_value_heads": 1}, 300),
    ("llama-all-kv-heads", "llama", {"num_key_value_heads": 6}, 300),
    ("llama-rope-llama3", "llama", {"rope_scaling": LLAMA3}, 300),
    ("llama-rope-linear", "llama", {**SHORT, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}, 300),
    ("llama-rope-dynamic-long", "llama", {**SHORT, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 300),
    ("llama-rope-dynamic-short", "llama", {**SHORT, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 100),
    ("llama-rope-yarn", "llama", {**SHORT, "rope_scaling": YARN}, 300),
    ("llama-rope-yarn-mscale", "llama", {**SHORT, "rope_scaling": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7,
                                                                  "beta_fast": 16, "beta_slow": 2}}, 300),
    ("mistral-no-window", "mistral", {"sliding_window": None}, 300),
    ("qwen2-no-window", "qwen2", {"use_sliding_window": False}, 300),
    ("qwen3-biases", "qwen3", {"attention_bias": True}, 300),
    ("qwen3_moe-raw-weights", "qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2}, 300),
    ("phi3-short", "phi3", {}, 100),
    ("phi3-partial-rotary", "phi3", {"partial_rotary_factor": 0.5, "rope_scaling": LONGROPE}, 300),
    ("phi3-plain-window", "phi3", {"rope_scaling": None, "sliding_window": 24}, 300),
    ("gemma3-caps", "gemma3", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, 300),
    ("gemma3-plain-rope", "gemma3", {"rope_scaling": None, "sliding_window": 7}, 300),
    ("gemma2-no-caps", "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, 300),
]


def random_tokens(count: int, seed: int = 3) -> Tensor:
    return torch.randint(0, 258, (count,), generator=torch.Generator().manual_seed(seed))


def build(path: Path, max_model_len: int | None = None) -> Decoder:
    return build_model(resolve_model(str(path)), dtype=torch.float32, device="cpu", max_model_len=max_model_len)[0]


def reference_logits(path: Path, tokens: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: Tensor = model(tokens[None]).logits[0]
    return logits


@pytest.mark.parametrize(("family", "fields", "count"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_logits_equal_transformers(family: str, fields: dict[str, Any], count: int, tmp_path: Path) -> None:
    """Planted faults: the sign of a sine, weight without its norm offset, a window one too wide, no q norm, expert
    weights not normalised, the long factors for a short sequence, no post norm, an unscaled embedding."""
    tokens = random_tokens(count)
    path = tiny_model(tmp_path, family, seed=1, **fields)
    decoder = build(path, max_model_len=count)
    expected = reference_logits(path, tokens)
    for chunks in ([count], [1, 37, 2, count - 40]):
        actual = run_in_chunks(decoder, tokens, chunks)
        assert actual.shape == expected.shape
        assert (actual - expected).abs().max() <= TOLERANCE
    assert expected.std() > 0.1, "logits that hardly differ would prove nothing"


def test_multimodal_checkpoint_gives_its_language_model(tmp_path: Path) -> None:
    """Gemma 3 with a vision part: same logits as the text model alone. Planted fault: prefix not stripped."""
    from safetensors.torch import load_file, save_file

    text = tiny_model(tmp_path / "text", "gemma3")
    both = tiny_model(tmp_path / "both", "gemma3")
    config = (both / "config.json").read_text()
    (both / "config.json").write_text('{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", '
                                      f'"text_config": {config}}}')
    tensors = load_file(both / "model.safetensors")
    renamed = {"language_model." + name: tensor for name, tensor in tensors.items()}
    save_file({**renamed, "vision_tower.patch.weight": torch.ones(2)}, str(both / "model.safetensors"))
    tokens = random_tokens(40)
    assert torch.equal(run_in_chunks(build(both), tokens, [40]), run_in_chunks(build(text), tokens, [40]))
    model = Gemma3ForCausalLM.from_pretrained(text, dtype=torch.float32, attn_implementation="eager")
    assert (model(tokens[None]).logits[0] - run_in_chunks(build(both), tokens, [40])).abs().max() <= TOLERANCE


def test_forward_is_a_function_of_its_inputs(tmp_path: Path) -> None:
    """Two sequences one after the other, then the first again: nothing stays. Planted fault: a cached cosine table."""
    decoder = build(tiny_model(tmp_path, "gemma3"))
    first, second = random_tokens(50, 1), random_tokens(20, 2)
    before = run_in_chunks(decoder, first, [50])
    run_in_chunks(decoder, second, [20])
    assert torch.equal(run_in_chunks(decoder, first, [50]), before)


def test_rows_of_several_sequences_share_a_forward(tmp_path: Path) -> None:
    """Two sequences at different positions in one call, routed by `attend`. Planted fault: positions of row 0 for
    all."""
    decoder = build(tiny_model(tmp_path, "qwen3_moe"))
    one, two = random_tokens(30, 1), random_tokens(11, 2)
    attends = DenseAttention(decoder), DenseAttention(decoder)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(attends, *(torch.split(t, [30, 11]) for t in (query, key, value)), strict=True)
        return torch.cat([own(layer, q, k, v) for own, q, k, v in parts])

    with torch.inference_mode():
        hidden = decoder.forward(torch.cat((one, two)), torch.cat((torch.arange(30), torch.arange(11))), attend)
        both = decoder.logits(hidden)
    alone = torch.cat((run_in_chunks(decoder, one, [1] * 30), run_in_chunks(decoder, two, [1] * 11)))
    assert (both - alone).abs().max() <= TOLERANCE


def test_the_gemm_is_swappable(tmp_path: Path) -> None:
    """Every product goes through ops.linear. Planted fault: logits through F.linear."""
    source = resolve_model(str(tiny_model(tmp_path)))
    shapes: list[tuple[int, ...]] = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append(tuple(weight.shape))
        return torch.nn.functional.linear(x, weight, bias)

    decoder, spec = build_model(source, dtype=torch.float32, device="cpu", ops=ModelOps(linear=linear))
    run_in_chunks(decoder, random_tokens(5), [5])
    assert len(shapes) == 4 * spec.num_layers + 1
    assert shapes[-1] == (spec.vocab_size, spec.hidden_size)


@pytest.mark.parametrize("grouped", [grouped_gemm, grouped_loop, grouped_masked], ids=lambda f: f.__name__)
def test_grouped_products(grouped: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Groups of 5, 0, 15 and 4 rows. Planted fault: a row on a boundary given to the group before it."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(24, 32, generator=generator), torch.randn(4, 48, 32, generator=generator)
    expected = torch.cat((rows[:5] @ weight[0].T, rows[5:20] @ weight[2].T, rows[20:] @ weight[3].T))
    actual = grouped(rows, weight, torch.tensor([5, 5, 20, 24], dtype=torch.int32))
    assert torch.allclose(actual, expected, atol=1e-5)


def test_experts_equal_a_slow_loop() -> None:
    """Some experts get no token, some many. Planted fault: results left in expert order."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, gate_up, down = normal(7, 5), normal(9, 8, 5), normal(9, 5, 4)
    experts = torch.stack([torch.randperm(4, generator=generator)[:3] for _ in range(7)])  # experts 4 to 8 idle
    weights = normal(7, 3)
    slow = torch.zeros(7, 5)
    for token in range(7):
        for choice in range(3):
            expert = experts[token, choice]
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            slow[token] += weights[token, choice] * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    assert torch.allclose(mix_experts(x, weights, experts, gate_up, down, "silu"), slow, atol=1e-5)
