"""Loading: shards, dtypes, fp8 scales, chunks, and files that are broken in every way a user meets."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aspire.model import weights
from aspire.model.build import build_model
from aspire.model.layout import checkpoint_parts
from aspire.model.resolve import resolve_model
from aspire.testing.models import tiny_model

Tensors = dict[str, Tensor]


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    """What a decoder holds, by checkpoint name."""
    decoder, spec = build_model(resolve_model(str(path)), dtype=dtype, device="cpu")
    return {name: part.slice(decoder.parameters) for name, part in checkpoint_parts(spec).items()}


def write_shards(path: Path, tensors: Tensors, count: int) -> list[str]:
    """The checkpoint in `count` files with an index, tensors dealt out in turn."""
    (path / "model.safetensors").unlink()
    files = [f"model-{shard:05}-of-{count:05}.safetensors" for shard in range(count)]
    where = {name: files[position % count] for position, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == file}, str(path / file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return files


@pytest.mark.parametrize("chunk", [1, 1000, 1 << 20])
def test_loaded_values_are_the_file_s(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, in ragged chunks, and whole. Planted fault: the row offset of a chunk dropped."""
    monkeypatch.setattr(weights, "CHUNK_BYTES", chunk)
    path = tiny_model(tmp_path, "qwen3_moe")
    expected = load_file(path / "model.safetensors")
    actual = loaded(path)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_shards_and_progress(tmp_path: Path) -> None:
    """Three shards; the progress ends at the checkpoint's size. Planted fault: only the first shard opened."""
    path = tiny_model(tmp_path)
    expected = load_file(path / "model.safetensors")
    write_shards(path, expected, 3)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded(path).items())
    seen: list[tuple[int, int]] = []
    build_model(resolve_model(str(path)), dtype=torch.float32, device="cpu",
                progress=lambda done, total: seen.append((done, total)))
    size = sum(tensor.numel() * 4 for tensor in expected.values())
    assert seen == sorted(set(seen))
    assert seen[-1] == (size, size)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    """Planted fault: float16 bytes read as bfloat16."""
    path = tiny_model(tmp_path, dtype=str(stored).removeprefix("torch."))
    expected = load_file(path / "model.safetensors")
    assert {tensor.dtype for tensor in expected.values()} == {stored}
    assert all(torch.equal(tensor, expected[name].to(wanted)) for name, tensor in loaded(path, wanted).items())


# --- fp8 --------------------------------------------------------------------------------------------------------

BLOCK = 32


def per_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448
    return scale.reshape(()), scale.expand(weight.shape)


def per_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return scale, scale.expand(weight.shape)


def per_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Ragged at both ends: 48 and 80 are no multiples of 32."""
    rows, columns = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
    scale = torch.stack([torch.stack([weight[r * BLOCK:(r + 1) * BLOCK, c * BLOCK:(c + 1) * BLOCK].abs().max() / 448
                                      for c in range(columns)]) for r in range(rows)])
    full = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return scale, full[:weight.shape[0], :weight.shape[1]]


@pytest.mark.parametrize(("method", "suffix", "scaling"), [
    ("compressed-tensors", "_scale", per_tensor), ("compressed-tensors", "_scale", per_row),
    ("fp8", "_scale_inv", per_block)], ids=["tensor", "row", "block"])
def test_fp8_is_dequantised(method: str, suffix: str, scaling: Callable[[Tensor], tuple[Tensor, Tensor]],
                            tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: the scale of the chunk's first row for all its rows; blocks of 128 whatever the file has."""
    monkeypatch.setattr(weights, "CHUNK_BYTES", 5000)
    config = {"quant_method": method, "format": "float-quantized"}
    path = tiny_model(tmp_path, quantization_config=config)
    plain = load_file(path / "model.safetensors")
    stored: Tensors = {}
    expected: Tensors = {}
    for name, tensor in plain.items():
        if "_proj" not in name:
            stored[name] = expected[name] = tensor
            continue
        scale, full = scaling(tensor)
        stored[name] = (tensor / full).to(torch.float8_e4m3fn)
        stored[name + suffix] = scale.contiguous()
        stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
        expected[name] = stored[name].float() * full
    save_file(stored, str(path / "model.safetensors"))
    actual = loaded(path)
    assert all(torch.equal(actual[name], expected[name]) for name in plain)
    assert any(not torch.equal(actual[name], plain[name]) for name in plain)


def test_fp8_without_scales_is_refused(tmp_path: Path) -> None:
    """Planted fault: a missing scale read as 1."""
    path = tiny_model(tmp_path, quantization_config={"quant_method": "fp8"})
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, str(path / "model.safetensors"))
    with pytest.raises(ValueError, match=f"{name}.*fp8.*missing"):
        loaded(path)


def test_other_quantisations_are_refused(tmp_path: Path) -> None:
    """Planted fault: packed integers loaded as weights."""
    path = tiny_model(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"quantization gptq is not.*supported: fp8, compressed-tensors"):
        resolve_model(str(path))


# --- broken files -----------------------------------------------------------------------------------------------


def test_missing_shard(tmp_path: Path) -> None:
    """Named before anything is read. Planted fault: shards found by listing the directory."""
    path = tiny_model(tmp_path)
    files = write_shards(path, load_file(path / "model.safetensors"), 3)
    (path / files[1]).unlink()
    with pytest.raises(ValueError, match=f"shard {files[1]} is missing"):
        resolve_model(str(path))


def test_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    """Planted fault: offsets not compared with the file's size (a short read would then leave old values)."""
    path = tiny_model(tmp_path)
    file = path / "model.safetensors"
    last = max(weights.read_header(file).values(), key=lambda tensor: tensor.offset)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=rf"model\.safetensors: truncated: tensor '{last.name}'"):
        loaded(path)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (10).to_bytes(8, "little") + b"not json.."],
                         ids=["empty", "short", "long-header", "no-json"])
def test_files_that_are_not_safetensors(content: bytes, tmp_path: Path) -> None:
    """Planted fault: the header's length trusted (a read of exabytes)."""
    path = tiny_model(tmp_path)
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: (truncated or not a|broken) safetensors"):
        loaded(path)


def edit(path: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, str(path / "model.safetensors"))


NAME = "model.layers.1.self_attn.k_proj.weight"


def test_mismatching_checkpoints_name_the_tensor(tmp_path: Path) -> None:
    """Missing, foreign, of another shape, of an integer type. Planted fault: foreign tensors skipped silently."""
    changes: list[tuple[Callable[[Tensors], object], str]] = [
        (lambda t: t.pop(NAME), f"lacks tensor '{NAME}'"),
        (lambda t: t.update({"model.layers.9.foo": torch.ones(1)}), r"'model\.layers\.9\.foo', which the model do"),
        (lambda t: t.update({NAME: torch.ones(16, 47)}), rf"'{NAME}' has shape \(16, 47\).*\(16, 48\)"),
        (lambda t: t.update({NAME: torch.ones(16, 48, dtype=torch.int8)}), f"'{NAME}' is stored as I8; supported"),
    ]
    for number, (change, message) in enumerate(changes):
        path = tiny_model(tmp_path / str(number))
        edit(path, change)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            loaded(path)


def test_a_tied_model_may_carry_its_head(tmp_path: Path) -> None:
    """Some checkpoints store lm_head although it is tied. Planted fault: refused as foreign."""
    path = tiny_model(tmp_path, tie_word_embeddings=True)
    edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in loaded(path)


def test_dummy_weights_are_seeded(tmp_path: Path) -> None:
    """No weight file is needed; values differ between tensors and repeat. Planted fault: one seed for all tensors."""
    path = tiny_model(tmp_path, "gemma2")
    (path / "model.safetensors").unlink()
    source = resolve_model(str(path), load_format="dummy")
    first, second = (build_model(source, dtype=torch.float32, device="cpu")[0].parameters for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["0.qkv"], first["1.qkv"])
    assert bool((first["norm"] == 0).all()), "Gemma's norms add 1 to what is stored"
