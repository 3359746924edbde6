"""The real SmolLM2-135M-Instruct: weights, logits and tokenizer against transformers reading the same GGUF file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from aspire.model.build import build_model
from aspire.model.layout import checkpoint_parts
from aspire.model.resolve import load_generation_defaults, load_tokenizer, resolve_model
from aspire.testing.dense import run_in_chunks

pytestmark = pytest.mark.slow
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model("smollm2-135m"))


def test_weights_and_logits_equal_transformers(tokenizer: Any) -> None:
    """300 tokens of text, whole and in chunks. Planted fault: key rows left in llama.cpp's order."""
    source = resolve_model("smollm2-135m")
    decoder, spec = build_model(source, dtype=torch.float32, device="cpu")
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(source.config, attn_implementation="eager")
    tensors = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=model)["tensors"]
    tensors = {name: torch.as_tensor(tensor).float() for name, tensor in tensors.items()}
    for name, part in checkpoint_parts(spec).items():
        assert torch.equal(part.slice(decoder.parameters), tensors[name]), name
    model.load_state_dict({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(source.config)
    tokens = torch.tensor(tokenizer.encode(TEXT)[:300])
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    for chunks in ([300], [1, 99, 17, 183]):
        assert (run_in_chunks(decoder, tokens, chunks) - expected).abs().max() <= 1e-4


def test_tokenizer_equals_transformers(tokenizer: Any) -> None:
    """On text without digits: transformers' conversion drops the file's rule that digits stand alone, ours keeps it.

    Planted fault: added tokens left out (chat markers then split into letters).
    """
    path = resolve_model("smollm2-135m").path
    other = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    words = "".join(character for character in TEXT if not character.isdigit()) + " é€ 你好 \n\t  def f(x):  <|im_end|>"
    assert tokenizer.encode(words) == other.encode(words)
    assert tokenizer.decode(tokenizer.encode(words)) == words
    chat = [{"role": "user", "content": "Hi"}]
    assert (tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            == other.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x 1234")) == ["x", "Ġ", "1", "2", "3", "4"]


def test_ends_of_a_turn(tokenizer: Any) -> None:
    """Planted fault: eos taken from the config class's default."""
    source = resolve_model("smollm2-135m")
    ids = load_generation_defaults(source).eos_token_ids
    assert tokenizer.convert_ids_to_tokens(list(ids)) == ["<|im_end|>"]
    assert "<|im_start|>" in tokenizer.chat_template
