"""GGUF: files written by the gguf package against the safetensors checkpoint they come from, and broken ones."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from aspire.model import weights
from aspire.model.build import build_model
from aspire.model.gguf import GgufFile, GgufSource, GgufTensor, read_gguf
from aspire.model.resolve import load_tokenizer, resolve_model
from aspire.testing.dense import run_in_chunks
from aspire.testing.models import tiny_model

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp"}
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "intermediate_size": 96, "num_hidden_layers": 3}
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a rotated projection: halves of a head become neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, checkpoint: Path, architecture: str, *, quantise: bool = False, **fields: Any) -> Path:
    """The checkpoint as a GGUF file; matrices of the MLPs in Q8_0 if asked."""
    writer = gguf.GGUFWriter(str(path), architecture)
    sizes = {"block_count": 3, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
             "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16, "vocab_size": 258}
    for name, value in {**sizes, **fields}.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 257)
    for name, array in gguf_tensors(load_file(checkpoint / "model.safetensors"), architecture).items():
        if quantise and ".ffn_" in name and array.ndim > 1:
            writer.add_tensor(name, gguf.quants.quantize(array, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(tensors: dict[str, Tensor], architecture: str) -> dict[str, np.ndarray]:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}
    out: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if name in top:
            out[top[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        stem, kind = rest.rsplit(".", 1)
        if ".experts." in stem:
            kind = stem.split(".")[3].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", []).append(array)
            continue
        if architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            array = interleave(array, 4 if "q_proj" in stem else 2)
        out[f"blk.{layer}.{NAMES[stem]}.{kind}"] = array
    return out | {name: np.stack(arrays) for name, arrays in experts.items()}


@pytest.mark.parametrize("chunk", [1, 4000, 1 << 24])
@pytest.mark.parametrize(("family", "architecture", "fields", "header"), [
    ("llama", "llama", {}, {}), ("llama", "llama", {"tie_word_embeddings": True}, {}),
    ("qwen2", "qwen2", {"use_sliding_window": False}, {}), ("qwen3", "qwen3", {}, {}),
    ("qwen3_moe", "qwen3moe", {"mlp_only_layers": []}, {"expert_count": 6, "expert_used_count": 2,
                                                        "expert_feed_forward_length": 24}),
], ids=["llama", "llama-tied", "qwen2", "qwen3", "qwen3moe"])
def test_same_model_as_the_checkpoint(chunk: int, family: str, architecture: str, fields: dict[str, Any],
                                      header: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-equal logits. Planted faults: queries not de-interleaved, a chunk ending inside a head, expert 0 for all."""
    monkeypatch.setattr(weights, "CHUNK_BYTES", chunk)
    checkpoint = tiny_model(tmp_path / "hf", family, **SIZES, **fields)
    file = write_gguf(tmp_path / "model.gguf", checkpoint, architecture, **header)
    tokens = torch.arange(40) * 7 % 258
    logits = []
    for name in (str(checkpoint), str(file)):
        decoder, spec = build_model(resolve_model(name), dtype=torch.float32, device="cpu")
        assert spec.eos_token_ids == (257,)
        logits.append(run_in_chunks(decoder, tokens, [40]))
    assert torch.allclose(logits[0], logits[1], rtol=0, atol=1e-5)  # epsilon and theta pass through float32


def test_quantised_tensors(tmp_path: Path) -> None:
    """Q8_0 comes out as the gguf package decodes it. Planted fault: rows counted in elements, not in blocks."""
    checkpoint = tiny_model(tmp_path / "hf", **SIZES)
    file = write_gguf(tmp_path / "model.gguf", checkpoint, "llama", quantise=True)
    decoder, _ = build_model(resolve_model(str(file)), dtype=torch.float32, device="cpu")
    weight = load_file(checkpoint / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), Q8_0), Q8_0))
    assert torch.equal(decoder.parameters["1.down"], expected)
    assert not torch.equal(expected, weight)


DECODABLE = [kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits]


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_every_quantisation_by_rows(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Rows 3 to 7 of random bytes equal those rows of the whole, decoded at once. Planted fault: rows from 0."""
    rows, columns = 9, 512
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (rows, columns // block * size), dtype=np.uint8)
    path = tmp_path / "raw"
    path.write_bytes(b"head" + raw.tobytes())
    tensor = GgufTensor("x.weight", (rows, columns), kind.value, 4)
    with GgufSource(GgufFile(path, {}, {"x.weight": tensor}), heads=1, kv_heads=1) as source:
        actual = source.read_tensor("x.weight", 3, 5)
    expected = gguf.dequantize(raw, kind)
    assert actual.dtype == torch.float32
    assert np.array_equal(actual.numpy(), expected[3:8].astype(np.float32), equal_nan=True)
    assert len({row.tobytes() for row in expected}) == rows, "rows must differ"


def test_llama3_frequencies_are_read_from_the_file(tmp_path: Path) -> None:
    """rope_freqs.weight divides the frequencies. Planted fault: the tensor ignored."""
    checkpoint = tiny_model(tmp_path / "hf", **SIZES)
    divisors = np.array([1, 1, 1, 2, 4, 8, 8, 8], dtype=np.float32)
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(checkpoint / "model.safetensors")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    for name, value in {"block_count": 3, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
                        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 258}.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("rope_freqs.weight", divisors)
    for name, array in gguf_tensors({k: torch.from_numpy(v) for k, v in tensors.items()}, "llama").items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    decoder, spec = build_model(resolve_model(str(tmp_path / "m.gguf")), dtype=torch.float32, device="cpu")
    inverse, scaling = decoder._ropes[0]
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    assert torch.allclose(inverse, plain / torch.from_numpy(divisors))
    assert scaling == 1.0
    assert spec.max_model_len == 512


def test_broken_files(tmp_path: Path) -> None:
    """Truncated data names the tensor; a cut header, another file type and an unknown family name the file.

    Planted fault: tensor ends not compared with the file's size.
    """
    checkpoint = tiny_model(tmp_path / "hf", **SIZES)
    good = write_gguf(tmp_path / "model.gguf", checkpoint, "llama")
    content = good.read_bytes()
    last = max(read_gguf(good).tensors.values(), key=lambda tensor: tensor.offset)
    cases = [(content[:-64], f"tensor '{last.name}'"), (content[:100], "truncated or broken GGUF header"),
             (b"GGML" + content[4:], "not a GGUF file"), (b"", "not a GGUF file"),
             (content[:4] + b"\x07" + content[5:], "version 7")]
    for number, (broken, message) in enumerate(cases):
        file = tmp_path / f"broken{number}.gguf"
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=message):
            resolve_model(str(file))
    other = write_gguf(tmp_path / "other.gguf", checkpoint, "mamba")
    with pytest.raises(ValueError, match="'mamba' is not supported; supported: llama, qwen2, qwen3"):
        resolve_model(str(other))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(resolve_model(str(good)))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    """Planted fault: parameters left uninitialised."""
    checkpoint = tiny_model(tmp_path / "hf", **SIZES)
    file = write_gguf(tmp_path / "model.gguf", checkpoint, "llama", block_count=4)
    with pytest.raises(ValueError, match=r"lacks tensor 'model\.layers\.3\."):
        build_model(resolve_model(str(file)), dtype=torch.float32, device="cpu")
