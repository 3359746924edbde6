"""Fills a decoder's parameters from a checkpoint, a few rows at a time: no second copy of the weights exists.

Safetensors headers are read here (8 bytes, JSON, data) rather than through the library's memory map, whose pages
count as memory of the process and make a model's peak twice its size.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from aspire.model.layout import Parameters, Part

Progress = Callable[[int, int], None]  # bytes of the checkpoint read so far, and in total

CHUNK_BYTES = 4 << 20  # of float32 values; a dequantisation takes a few times as much
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("_scale_inv", "_scale")
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.input_scale$|\.[kv]_scale$|^(model\.)?(vision_tower|visual|"
                      r"multi_modal_projector|vision_model)\.")


class Source(Protocol):
    """A checkpoint that is read by rows. Names are HF's."""

    def names(self, wanted: Mapping[str, object]) -> Mapping[str, str]: ...
    def locate(self, name: str) -> tuple[str, int]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def describe(self, name: str) -> str: ...
    def num_bytes(self, name: str) -> int: ...
    def row_multiple(self, name: str) -> int: ...
    def read(self, name: str, first: int, count: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    path: Path
    name: str  # in the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from the file's beginning
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises ValueError naming the file, and the tensor where one is at fault."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: truncated or not a safetensors file (header of {length} bytes in a file of "
                             f"{size})")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: broken safetensors header ({error})") from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name] = _stored(path, name, entry, 8 + length, size)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: broken safetensors header entry for tensor {name!r}") from error
    return tensors


def _stored(path: Path, name: str, entry: Mapping[str, Any], data: int, file_size: int) -> StoredTensor:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if data + end > file_size:
        raise ValueError(f"{path}: truncated: tensor {name!r} ends at byte {data + end} of a file of {file_size}")
    if dtype not in _DTYPES:
        raise ValueError(f"{path}: tensor {name!r} is stored as {dtype}; supported: {', '.join(_DTYPES)}")
    stored = StoredTensor(path, name, _DTYPES[str(dtype)], shape, data + begin, end - begin)
    if stored.num_bytes != torch.Size(shape).numel() * stored.dtype.itemsize:
        raise ValueError(f"{path}: tensor {name!r} of shape {shape} holds {stored.num_bytes} bytes")
    return stored


class SafetensorsSource:
    """Safetensors files as one checkpoint. fp8 weights are multiplied by their scales as they are read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._tensors = {plain_name(name): tensor for path in paths for name, tensor in read_header(path).items()}
        self._buffer = bytearray(0)
        self._scales = {name: self._find_scale(name) for name, stored in self._tensors.items() if stored.dtype in _FP8}

    def names(self, wanted: Mapping[str, object]) -> Mapping[str, str]:
        scales = {name + suffix for name in self._scales for suffix in _SCALES}
        return {name: name for name in self._tensors if name not in scales and not _IGNORED.search(name)}

    def locate(self, name: str) -> tuple[str, int]:
        return str(self._tensors[name].path), self._tensors[name].offset

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def describe(self, name: str) -> str:
        return f"{self._tensors[name].path}: tensor {self._tensors[name].name!r}"

    def num_bytes(self, name: str) -> int:
        return self._tensors[name].num_bytes

    def row_multiple(self, name: str) -> int:
        return 1

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows [first, first + count) on the CPU; valid until the next read."""
        rows = self._read_rows(self._tensors[name], first, count)
        if name not in self._scales:
            return rows
        return rows.float() * self._scale_of_rows(name, first, count)

    def _read_rows(self, stored: StoredTensor, first: int, count: int) -> Tensor:
        rows = stored.shape[0] if stored.shape else 1
        row_bytes = stored.num_bytes // max(rows, 1)
        size = row_bytes * count
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.offset + first * row_bytes)
            view, done = memoryview(self._buffer)[:size], 0
            while done < size:
                got = file.readinto(view[done:])
                if not got:
                    raise ValueError(f"{stored.path}: truncated while reading tensor {stored.name!r}")
                done += got
        flat = torch.frombuffer(self._buffer, dtype=torch.uint8, count=size).view(stored.dtype)
        return flat.view(count, *stored.shape[1:]) if stored.shape else flat.view(())

    def _find_scale(self, name: str) -> Tensor:
        """The scale of an fp8 weight, float32 with as many dimensions: one, one a row, or one a block."""
        for suffix in _SCALES:
            stored = self._tensors.get(name + suffix)
            if stored is not None:
                scale = self._read_rows(stored, 0, stored.shape[0] if stored.shape else 1).float().clone()
                return scale.reshape(-1, 1) if scale.dim() < 2 else scale
        raise ValueError(f"{self.describe(name)} is fp8 but {name}_scale and {name}_scale_inv are both missing")

    def _scale_of_rows(self, name: str, first: int, count: int) -> Tensor:
        scale, (rows, columns) = self._scales[name], self.shape(name)
        height, width = (self._block_size(name, length, number)
                         for length, number in zip((rows, columns), scale.shape, strict=True))
        chosen = scale[torch.arange(first, first + count) // height]
        return chosen.repeat_interleave(width, dim=1)[:, :columns]

    def _block_size(self, name: str, length: int, number: int) -> int:
        """The size of blocks of which `number` cover `length`: all of it, or a power of two (at most one fits)."""
        if number == 1:
            return length
        for size in (1 << power for power in range(13)):
            if -(-length // size) == number:
                return size
        raise ValueError(f"{self.describe(name)} has {number} scales for {length} rows or columns, which fits no "
                         "block size")


def plain_name(name: str) -> str:
    """The name without the prefixes under which multimodal checkpoints keep their language model."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def load(source: Source, parts: Mapping[str, Part], parameters: Parameters, progress: Progress | None = None) -> None:
    """Copies every part from a checked `source` into `parameters` (any dtype and device), in file order."""
    order = sorted(parts, key=source.locate)
    total = sum(source.num_bytes(name) for name in order)
    done = 0
    for name in order:
        target = parts[name].slice(parameters)
        _copy(source, name, target)
        done += source.num_bytes(name)
        if progress is not None:
            progress(done, total)


def check(source: Source, parts: Mapping[str, Part]) -> None:
    """Raises ValueError naming the tensor that is missing, unexpected or of another shape."""
    names = source.names(parts)
    missing = [name for name in parts if name not in names]
    if missing:
        raise ValueError(f"the checkpoint lacks tensor {missing[0]!r}" +
                         (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))
    tied = "lm_head.weight" not in parts
    extra = [stored for name, stored in names.items() if name not in parts and not (tied and name == "lm_head.weight")]
    if extra:
        raise ValueError(f"the checkpoint holds tensor {extra[0]!r}, which the model does not have" +
                         (f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""))
    for name, part in parts.items():
        if source.shape(name) != part.shape:
            raise ValueError(f"{source.describe(name)} has shape {source.shape(name)}, the config asks for "
                             f"{part.shape}")


def _copy(source: Source, name: str, target: Tensor) -> None:
    rows = target.shape[0]
    multiple = source.row_multiple(name)
    row_bytes = max(1, target[0].numel() * 4)
    step = rows if target.dim() == 1 else max(1, CHUNK_BYTES // row_bytes // multiple) * multiple
    for first in range(0, rows, step):
        count = min(step, rows - first)
        target[first:first + count].copy_(source.read(name, first, count))


def fill_dummy(parameters: Parameters, *, norm_offset: float, seed: int = 0) -> None:
    """Seeded random values of ordinary size; norm weights act as 1."""
    for index, (name, tensor) in enumerate(parameters.items()):
        if name.endswith("norm"):
            tensor.fill_(1.0 - norm_offset)
            continue
        generator = torch.Generator(tensor.device).manual_seed(seed * 1_000_003 + index)
        tensor.normal_(0.0, 0.02, generator=generator)
