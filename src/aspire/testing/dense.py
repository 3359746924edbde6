"""A plain causal attention with a growing KV cache: runs a Decoder without the engine, as tests' slow oracle."""

import torch
from torch import Tensor

from aspire.model.decoder import Decoder


class DenseAttention:
    """Keeps every key and value it was given; computes with explicit masks. One sequence."""

    def __init__(self, decoder: Decoder) -> None:
        self.spec = decoder.spec
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = self.spec
        if layer in self.cache:
            key = torch.cat((self.cache[layer][0], key))
            value = torch.cat((self.cache[layer][1], value))
        self.cache[layer] = (key, value)
        group = spec.num_heads // spec.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)  # [L, H, D]
        logits = torch.einsum("qhd,khd->hqk", query, key) * spec.attention_scale
        if spec.attention_softcap is not None:
            logits = torch.tanh(logits / spec.attention_softcap) * spec.attention_softcap
        total, new = key.shape[0], query.shape[0]
        distance = torch.arange(total - new, total)[:, None] - torch.arange(total)[None]  # [q, k]
        hidden = distance < 0
        window = spec.layers[layer].window
        if window is not None:
            hidden |= distance >= window
        return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, float("-inf")).softmax(-1), value)


def run_in_chunks(decoder: Decoder, tokens: Tensor, chunks: list[int]) -> Tensor:
    """Logits [T, V] of one sequence, prefilled in chunks of the given sizes."""
    attend = DenseAttention(decoder)
    out, start = [], 0
    with torch.inference_mode():
        for size in chunks:
            positions = torch.arange(start, start + size)
            out.append(decoder.logits(decoder.forward(tokens[start:start + size], positions, attend)))
            start += size
    assert start == len(tokens)
    return torch.cat(out)
