"""Which tensors a decoder owns, and where each tensor of a HF checkpoint goes in them.

Query, key and value projections are stored fused by rows, gate and up projections likewise, experts stacked. The
fusion is this table; nothing else knows of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aspire.model.spec import LayerSpec, ModelSpec

Shape = tuple[int, ...]
Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor of that shape fills rows [start, start + shape[0]) of a parameter (of one expert of it)."""

    parameter: str
    shape: Shape
    start: int = 0
    expert: int | None = None

    def slice(self, parameters: Parameters) -> Tensor:
        """The contiguous view to fill."""
        target = parameters[self.parameter]
        if self.expert is not None:
            target = target[self.expert]
        return target[self.start:self.start + self.shape[0]]


def checkpoint_parts(spec: ModelSpec) -> dict[str, Part]:
    """Checkpoint tensor name -> its part, for all tensors a checkpoint of this model must hold."""
    parts = {"model.embed_tokens.weight": Part("embed", (spec.vocab_size, spec.hidden_size)),
             "model.norm.weight": Part("norm", (spec.hidden_size,))}
    if not spec.tied_embeddings:
        parts["lm_head.weight"] = Part("head", (spec.vocab_size, spec.hidden_size))
    for index, layer in enumerate(spec.layers):
        for name, part in _layer_parts(spec, layer):
            parts[f"model.layers.{index}.{name}"] = replace(part, parameter=f"{index}.{part.parameter}")
    return parts


def parameter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name -> shape of every parameter: the parts of each, put together."""
    shapes: dict[str, Shape] = {}
    for part in checkpoint_parts(spec).values():
        rows = max(part.start + part.shape[0], shapes.get(part.parameter, (0,) * 3)[-len(part.shape)])
        lead = () if part.expert is None or spec.moe is None else (spec.moe.num_experts,)
        shapes[part.parameter] = (*lead, rows, *part.shape[1:])
    return shapes


def allocate(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Uninitialised parameters."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in parameter_shapes(spec).items()}


def _layer_parts(spec: ModelSpec, layer: LayerSpec) -> Iterator[tuple[str, Part]]:
    hidden, dim = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads * dim, spec.num_kv_heads * dim
    if spec.fused_checkpoint:
        yield "self_attn.qkv_proj.weight", Part("qkv", (q + 2 * kv, hidden))
    else:
        yield from _fuse("self_attn.{}_proj", "qkv", {"q": q, "k": kv, "v": kv}, hidden, spec.qkv_bias)
    yield from _fuse("self_attn.{}_proj", "output", {"o": hidden}, q, spec.output_bias)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", Part("q_norm", (dim,))
        yield "self_attn.k_norm.weight", Part("k_norm", (dim,))
    yield "input_layernorm.weight", Part("attention_norm", (hidden,))
    if spec.post_norms:
        yield "post_attention_layernorm.weight", Part("attention_post_norm", (hidden,))
        yield "pre_feedforward_layernorm.weight", Part("mlp_norm", (hidden,))
        yield "post_feedforward_layernorm.weight", Part("mlp_post_norm", (hidden,))
    else:
        yield "post_attention_layernorm.weight", Part("mlp_norm", (hidden,))
    yield from _mlp_parts(spec, layer)


def _mlp_parts(spec: ModelSpec, layer: LayerSpec) -> Iterator[tuple[str, Part]]:
    hidden, width = spec.hidden_size, spec.intermediate_size
    if layer.moe and spec.moe is not None:
        width = spec.moe.intermediate_size
        yield "mlp.gate.weight", Part("router", (spec.moe.num_experts, hidden))
        for expert in range(spec.moe.num_experts):
            name = f"mlp.experts.{expert}."
            yield name + "gate_proj.weight", Part("experts_gate_up", (width, hidden), 0, expert)
            yield name + "up_proj.weight", Part("experts_gate_up", (width, hidden), width, expert)
            yield name + "down_proj.weight", Part("experts_down", (hidden, width), 0, expert)
        return
    if spec.fused_checkpoint:
        yield "mlp.gate_up_proj.weight", Part("gate_up", (2 * width, hidden))
    else:
        yield from _fuse("mlp.{}_proj", "gate_up", {"gate": width, "up": width}, hidden, spec.mlp_bias)
    yield from _fuse("mlp.{}_proj", "down", {"down": hidden}, width, spec.mlp_bias)


def _fuse(pattern: str, parameter: str, rows: dict[str, int], columns: int, bias: bool) -> Iterator[tuple[str, Part]]:
    start = 0
    for name, count in rows.items():
        yield pattern.format(name) + ".weight", Part(parameter, (count, columns), start)
        if bias:
            yield pattern.format(name) + ".bias", Part(parameter + "_bias", (count,), start)
        start += count
