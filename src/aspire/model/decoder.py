"""One decoder for all families. Holds weights, no KV: attention is the caller's, so forward is a pure function.

Letters: T tokens, N chosen tokens, H query heads, K KV heads, D head dim, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire.model.layers import ModelOps, choose_experts
from aspire.model.layout import Parameters
from aspire.model.rope import cos_sin, inverse_frequencies
from aspire.model.spec import LayerSpec, ModelSpec

# (layer, query [T, H, D], key [T, K, D], value [T, K, D]) -> [T, H, D]. Keys come rotated and normalised.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's parameters; absent ones are None. Names and shapes are those of layout.py."""

    spec: LayerSpec
    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(H + 2K) * D, hidden]
    output: Tensor  # [hidden, H * D]
    mlp_norm: Tensor  # [hidden]
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    gate_up: Tensor | None = None  # [2I, hidden]
    gate_up_bias: Tensor | None = None
    down: Tensor | None = None  # [hidden, I]
    down_bias: Tensor | None = None
    router: Tensor | None = None  # [E, hidden]
    experts_gate_up: Tensor | None = None  # [E, 2I, hidden]
    experts_down: Tensor | None = None  # [E, hidden, I]


class Decoder:
    """A model on a device. Call under torch.inference_mode; safe to capture in a CUDA graph."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, ops: ModelOps | None = None) -> None:
        self.spec = spec
        self.parameters = parameters
        self.ops = ops or ModelOps()
        self.embed = parameters["embed"]  # [V, hidden]
        self.head = parameters.get("head", self.embed)  # [V, hidden]
        self.norm = parameters["norm"]
        self.layers = tuple(
            LayerWeights(layer, **{name.split(".", 1)[1]: tensor for name, tensor in parameters.items()
                                   if name.startswith(f"{index}.")})
            for index, layer in enumerate(spec.layers))
        # Rounded to the weights' dtype, as the models were trained (Gemma).
        self._embedding_scale = (None if spec.embedding_scale is None
                                 else torch.tensor(spec.embedding_scale, dtype=self.dtype).item())
        self._ropes = []
        for rope in spec.ropes:
            inverse, scaling = inverse_frequencies(rope, spec.max_model_len)
            self._ropes.append((inverse.to(self.device), scaling))

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes that a forward reads of the weights, the output head included, the input embedding left out if it is
        a table of its own (a step reads a few of its rows)."""
        total = sum(t.numel() * t.element_size() for t in self.parameters.values())
        if self.head is not self.embed:
            total -= self.embed.numel() * self.embed.element_size()
        return total

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [T, hidden], normalised, of tokens int64 [T] at positions int64 [T].

        `attend` stores keys and values and returns the attention output. Its value argument is a strided view
        (stride(-1) == 1), query and key are contiguous where the layer rotates or normalises them.
        """
        spec, ops = self.spec, self.ops
        rotations = [cos_sin(positions, inverse, scaling, self.dtype) for inverse, scaling in self._ropes]
        residual = F.embedding(tokens, self.embed)  # [T, hidden]
        if self._embedding_scale is not None:
            residual = residual * self._embedding_scale
        normed = ops.rms_norm(residual, self.layers[0].attention_norm, spec.norm_eps, spec.norm_offset)
        for index, weights in enumerate(self.layers):
            rotation = None if weights.spec.rope is None else rotations[weights.spec.rope]
            out = self._attention(index, weights, normed, rotation, attend)
            if weights.attention_post_norm is not None:
                out = ops.rms_norm(out, weights.attention_post_norm, spec.norm_eps, spec.norm_offset)
            normed, residual = ops.add_rms_norm(out, residual, weights.mlp_norm, spec.norm_eps, spec.norm_offset)
            out = self._mlp(weights, normed)
            if weights.mlp_post_norm is not None:
                out = ops.rms_norm(out, weights.mlp_post_norm, spec.norm_eps, spec.norm_offset)
            last = index + 1 == len(self.layers)
            following = self.norm if last else self.layers[index + 1].attention_norm
            normed, residual = ops.add_rms_norm(out, residual, following, spec.norm_eps, spec.norm_offset)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [N, V] of final hidden states [N, hidden]."""
        logits = self.ops.linear(hidden, self.head, None)
        if self.spec.logit_softcap is not None:
            logits = torch.tanh(logits / self.spec.logit_softcap) * self.spec.logit_softcap
        return logits.float()

    def _attention(self, index: int, weights: LayerWeights, x: Tensor, rotation: tuple[Tensor, Tensor] | None,
                   attend: Attend) -> Tensor:
        spec, ops = self.spec, self.ops
        qkv = ops.linear(x, weights.qkv, weights.qkv_bias)
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)  # [T, H + 2K, D]
        query, key, value = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            query = ops.rms_norm(query, weights.q_norm, spec.norm_eps, spec.norm_offset)
            key = ops.rms_norm(key, weights.k_norm, spec.norm_eps, spec.norm_offset)
        if rotation is not None:
            query, key = ops.rotate(query, key, *rotation)
        out = attend(index, query, key, value)  # [T, H, D]
        return ops.linear(out.reshape(out.shape[0], -1), weights.output, weights.output_bias)

    def _mlp(self, weights: LayerWeights, x: Tensor) -> Tensor:
        spec, ops = self.spec, self.ops
        if weights.router is not None and spec.moe is not None:
            assert weights.experts_gate_up is not None
            assert weights.experts_down is not None
            chosen, experts = choose_experts(ops.linear(x, weights.router, None), spec.moe.num_active,
                                             spec.moe.normalize)
            return ops.mix_experts(x, chosen, experts, weights.experts_gate_up, weights.experts_down, spec.activation)
        assert weights.gate_up is not None
        assert weights.down is not None
        hidden = ops.gate(ops.linear(x, weights.gate_up, weights.gate_up_bias), spec.activation)
        return ops.linear(hidden, weights.down, weights.down_bias)
