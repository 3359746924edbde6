"""GGUF files: header, HF config, and tensors dequantised a few rows at a time.

The header is parsed here because gguf.GGUFReader takes seconds and more memory than a small model (docs/LOG.md);
the quantisation formats are the gguf package's. Knows nothing of the decoder.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: rows first, as torch has it. offset: from the file's beginning."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The field `key` of this file's architecture ("context_length" finds "llama.context_length")."""
        return self.fields.get(f"{self.architecture}.{key}", default)


class _Cursor:
    """Reads the header's values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4

    def scalar(self, layout: str) -> Any:
        value = struct.unpack_from(layout, self.data, self.at)[0]
        self.at += struct.calcsize(layout)
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        if self.at + size > len(self.data):
            raise struct.error("string beyond the end of the file")
        raw = self.data[self.at:self.at + size]
        self.at += size
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("<I"), self.scalar("<Q")
        if inner in _SCALARS:
            values = struct.unpack_from(f"<{count}{_SCALARS[inner][1]}", self.data, self.at)
            self.at += struct.calcsize(_SCALARS[inner]) * count
            return list(values)
        return [self.value(inner) for _ in range(count)]


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file (version 2 or 3). Raises ValueError if it is none, or is truncated."""
    if path.stat().st_size < 24:
        raise ValueError(f"{path}: not a GGUF file (shorter than its header)")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != _MAGIC:
            raise ValueError(f"{path}: not a GGUF file (it begins with {data[:4]!r}, not {_MAGIC!r})")
        try:
            fields, tensors = _parse(_Cursor(data))
        except (struct.error, KeyError, MemoryError, OverflowError) as error:
            raise ValueError(f"{path}: truncated or broken GGUF header ({error})") from error
        for tensor in tensors.values():
            if tensor.offset + _num_bytes(tensor, path) > len(data):
                raise ValueError(f"{path}: truncated: tensor {tensor.name!r} ends beyond the end of the file")
    return GgufFile(path, fields, tensors)


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise struct.error(f"version {version}; 2 and 3 are supported")
    num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
    fields = {}
    for _ in range(num_fields):
        name = cursor.string()
        fields[name] = cursor.value(cursor.scalar("<I"))
    infos = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))[::-1]
        infos.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = int(fields.get("general.alignment", 32))
    start = -(-cursor.at // alignment) * alignment
    return fields, {name: GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in infos}


def _row_bytes(tensor: GgufTensor, path: Path) -> int:
    """Bytes of one row (the last dimension) as stored."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: tensor {tensor.name!r} has unknown quantisation type {tensor.type_id}") from error
    if tensor.shape[-1] % block:
        raise ValueError(f"{path}: tensor {tensor.name!r} has rows of {tensor.shape[-1]}, not a multiple of {block}")
    return int(tensor.shape[-1] // block * size)


def _num_bytes(tensor: GgufTensor, path: Path) -> int:
    rows = 1
    for size in tensor.shape[:-1]:
        rows *= size
    return rows * _row_bytes(tensor, path)


# --- config -----------------------------------------------------------------------------------------------------

_MODEL_TYPES = {"llama": ("llama", "LlamaForCausalLM"), "qwen2": ("qwen2", "Qwen2ForCausalLM"),
                "qwen3": ("qwen3", "Qwen3ForCausalLM"), "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM")}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The HF config that this file's header describes. Raises ValueError for an unsupported or incomplete one."""
    if file.architecture not in _MODEL_TYPES:
        raise ValueError(f"{file.path}: GGUF architecture {file.architecture!r} is not supported; "
                         f"supported: {', '.join(_MODEL_TYPES)}")
    model_type, architecture = _MODEL_TYPES[file.architecture]
    needed = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
              "attention.layer_norm_rms_epsilon")
    missing = [key for key in needed if file.get(key) is None]
    if missing and not (missing == ["feed_forward_length"] and file.architecture == "qwen3moe"):
        raise ValueError(f"{file.path}: the GGUF header lacks {', '.join(missing)}")
    heads = file.get("attention.head_count")
    hidden = file.get("embedding_length")
    config: dict[str, Any] = {
        "model_type": model_type, "architectures": [architecture], "dtype": "bfloat16",
        "hidden_size": hidden, "num_hidden_layers": file.get("block_count"), "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": file.get("attention.key_length", hidden // heads),
        "intermediate_size": file.get("feed_forward_length", file.get("expert_feed_forward_length")),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.get("context_length"),
        "vocab_size": file.get("vocab_size", len(file.fields.get("tokenizer.ggml.tokens", ()))),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.fields.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": _rope_parameters(file),
    }
    if file.architecture in ("llama", "qwen3", "qwen3moe"):
        config["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    if file.architecture == "qwen3moe":
        config.update(num_experts=file.get("expert_count"), num_experts_per_tok=file.get("expert_used_count"),
                      moe_intermediate_size=file.get("expert_feed_forward_length"), norm_topk_prob=True)
    return config


def _rope_parameters(file: GgufFile) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": file.get("rope.freq_base", 10000.0)}
    kind = file.get("rope.scaling.type", "none")
    original = file.get("rope.scaling.original_context_length", file.get("context_length"))
    if kind not in ("none", ""):
        parameters.update(rope_type=kind, factor=file.get("rope.scaling.factor", 1.0),
                          original_max_position_embeddings=original)
    if "rope_freqs.weight" in file.tensors:
        # Llama 3's scaling is stored as one divisor per frequency, which is what longrope's lists are.
        with GgufSource(file, heads=1, kv_heads=1) as source:
            divisors = source.read_tensor("rope_freqs.weight", 0, 0).tolist()
        parameters.update(rope_type="longrope", short_factor=divisors, long_factor=divisors, attention_factor=1.0,
                          original_max_position_embeddings=original)
    return parameters


# --- tensors ----------------------------------------------------------------------------------------------------

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}
_IGNORED = ("rope_freqs.weight",)


class GgufSource:
    """A GGUF file as a checkpoint: HF names and shapes, values as HF stores them (see weights.Source)."""

    def __init__(self, file: GgufFile, *, heads: int, kv_heads: int) -> None:
        self._gguf = file
        self._heads = {"attn_q": heads, "attn_k": kv_heads} if file.architecture == "llama" else {}
        self._stream = file.path.open("rb")

    def __enter__(self) -> "GgufSource":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def names(self, wanted: "Mapping[str, object]") -> dict[str, str]:
        """HF name -> GGUF name, of the wanted tensors that the file has, then of those nobody asked for."""
        found = {name: stored for name in wanted if (stored := self._stored_name(name)) in self._gguf.tensors}
        used = {*found.values(), *_IGNORED}
        return found | {stored: stored for stored in self._gguf.tensors if stored not in used}

    def locate(self, name: str) -> tuple[str, int]:
        """Where the tensor lies, for reading in order."""
        return self._gguf.path.name, self._gguf.tensors[self._stored_name(name)].offset

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._gguf.tensors[self._stored_name(name)].shape
        return shape[1:] if _expert(name) is not None else shape

    def describe(self, name: str) -> str:
        return f"{self._gguf.path}: tensor {self._stored_name(name)!r}"

    def num_bytes(self, name: str) -> int:
        tensor = self._gguf.tensors[self._stored_name(name)]
        whole = _num_bytes(tensor, self._gguf.path)
        return whole if _expert(name) is None else whole // tensor.shape[0]

    def row_multiple(self, name: str) -> int:
        """Rows must be read in multiples of this (a head, where its rows are interleaved)."""
        kind = self._stored_name(name).split(".")[-2]
        return self.shape(name)[0] // self._heads[kind] if kind in self._heads else 1

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows [first, first + count), float32 on the CPU."""
        rows = self.shape(name)[0]
        expert = _expert(name)
        start = first + (0 if expert is None else expert * rows)
        values = self.read_tensor(self._stored_name(name), start, count)
        step = self.row_multiple(name)
        if step == 1:
            return values
        # llama.cpp pairs rotated dimensions (0, 1), (2, 3) ...; HF pairs the halves of a head.
        return values.reshape(-1, step // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)

    def read_tensor(self, stored: str, first: int, count: int) -> Tensor:
        """Rows of a tensor by its GGUF name; a one-dimensional tensor is read whole."""
        import numpy
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._gguf.tensors[stored]
        size = _row_bytes(tensor, self._gguf.path)
        flat = len(tensor.shape) == 1
        self._stream.seek(tensor.offset + (0 if flat else first * size))
        raw = self._stream.read(size if flat else count * size)
        rows = numpy.frombuffer(raw, dtype=numpy.uint8).reshape(1 if flat else count, size)
        kind = GGMLQuantizationType(tensor.type_id)
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            rows = rows.view(numpy.float32 if kind == GGMLQuantizationType.F32 else numpy.float16)
        try:
            values = dequantize(rows, kind)
        except NotImplementedError as error:
            raise ValueError(f"{self._gguf.path}: tensor {stored!r} is quantised as {kind.name}, which the gguf "
                             "package cannot decode") from error
        result = torch.from_numpy(numpy.array(values, dtype=numpy.float32))
        return result[0] if flat else result

    def _stored_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        match = re.match(r"model\.layers\.(\d+)\.(.*)", stem)
        if match is None:
            return f"{_NAMES.get(stem, stem)}.{kind}"
        expert = re.match(r"mlp\.experts\.\d+\.(\w+)_proj", match[2])
        short = f"ffn_{expert[1]}_exps" if expert else _NAMES.get(match[2], match[2])
        return f"blk.{match[1]}.{short}.{kind}"


def _expert(name: str) -> int | None:
    match = re.search(r"\.experts\.(\d+)\.", name)
    return int(match[1]) if match else None
