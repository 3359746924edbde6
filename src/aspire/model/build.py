"""build_model: from a resolved source to a decoder with its weights on a device."""

import torch

from aspire.model import weights
from aspire.model.decoder import Decoder
from aspire.model.families import read_spec
from aspire.model.gguf import GgufSource, read_gguf
from aspire.model.layers import ModelOps
from aspire.model.layout import allocate, checkpoint_parts
from aspire.model.resolve import ModelSource, load_generation_defaults
from aspire.model.spec import DTYPES, ModelSpec


def describe_model(source: ModelSource, *, max_model_len: int | None = None) -> ModelSpec:
    """The spec of a source, without its weights. Raises ValueError (see spec.read_spec)."""
    defaults = load_generation_defaults(source)
    return read_spec(source.config, max_model_len=max_model_len, eos_token_ids=defaults.eos_token_ids)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16". Raises ValueError for one that no model runs in."""
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def build_model(source: ModelSource, *, dtype: torch.dtype, device: torch.device | str,
                max_model_len: int | None = None, ops: ModelOps | None = None,
                progress: weights.Progress | None = None) -> tuple[Decoder, ModelSpec]:
    """The decoder of `source` in `dtype` on `device`, and its spec.

    Raises ValueError naming the file and tensor for a missing, truncated or mismatching checkpoint.
    """
    spec = describe_model(source, max_model_len=max_model_len)
    parts = checkpoint_parts(spec)
    device = torch.device(device)
    with torch.no_grad():
        if source.kind == "dummy":
            parameters = allocate(spec, dtype, device)
            weights.fill_dummy(parameters, norm_offset=spec.norm_offset)
        elif source.kind == "gguf":
            file = read_gguf(source.path)
            with GgufSource(file, heads=spec.num_heads, kv_heads=spec.num_kv_heads) as stored:
                weights.check(stored, parts)
                parameters = allocate(spec, dtype, device)
                weights.load(stored, parts, parameters, progress)
        else:
            tensors = weights.SafetensorsSource(source.weights)
            weights.check(tensors, parts)
            parameters = allocate(spec, dtype, device)
            weights.load(tensors, parts, parameters, progress)
    return Decoder(spec, parameters, ops), spec
