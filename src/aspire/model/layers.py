"""The operations between attentions, as torch reference and as one swappable bundle (ModelOps).

Letters: T tokens, H query heads, K KV heads, D head dim, E experts, A active experts, I intermediate size.
Every function is pure and, on CUDA, free of host synchronisation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm over the last dimension, accumulated in float32.

    offset 0: rounded to x's dtype before the weight is applied (Llama); else (weight + offset) applied in float32
    (Gemma), as each family was trained.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (weight.float() + offset)).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual): one operation so that a kernel can fuse it."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query [T, H, D] and key [T, K, D] with their first 2 * cos.shape[-1] dimensions rotated; cos, sin [T, dim / 2].

    Dimension i is paired with i + dim / 2 (Hugging Face's order).
    """
    cos, sin = cos[:, None], sin[:, None]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half:2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half:]), dim=-1)


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """activation(first half) * second half of [T, 2I]."""
    first, second = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(first) * second
    return F.gelu(first, approximate="tanh" if activation == "gelu_tanh" else "none") * second


def choose_experts(router_logits: Tensor, num_active: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Weights [T, A] in the logits' dtype and expert ids int64 [T, A], from router logits [T, E]."""
    weights, experts = router_logits.float().softmax(-1).topk(num_active, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(router_logits.dtype), experts


def mix_experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Sum over each token's experts of weight * MLP: x [T, hidden], gate_up [E, 2I, hidden], down [E, hidden, I].

    Tokens are sorted by expert; on CUDA a grouped GEMM reads the group ends on the device, on CPU a loop does.
    """
    num_experts, active = gate_up.shape[0], experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # [T * A], grouped by expert
    chosen = F.one_hot(experts.flatten(), num_experts).sum(0)  # [E]
    ends = chosen.cumsum(0).to(torch.int32)
    rows = x[order // active]  # [T * A, hidden]
    hidden = gate(_grouped(rows, gate_up, ends), activation)
    out = _grouped(hidden, down, ends) * weights.flatten()[order, None]
    # Back in token order, a fixed-order sum: unlike index_add_ it is deterministic on CUDA.
    return out[order.argsort()].view(x.shape[0], active, -1).sum(1)


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows [R, in] times weight[e].T for the rows in (ends[e - 1], ends[e]]; weight [E, out, in]."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    if rows.is_cuda:
        return _grouped_masked(rows, weight, ends)
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = F.linear(rows[start:end], weight[expert])
        start = end
    return out


def _grouped_masked(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same for dtypes without a grouped GEMM: every expert multiplies all rows. Slow, exact, no host sync."""
    owner = torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device, dtype=ends.dtype), right=True)
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    for expert in range(weight.shape[0]):
        out = torch.where((owner == expert)[:, None], F.linear(rows, weight[expert]), out)
    return out


@dataclass(frozen=True, slots=True)
class ModelOps:
    """The implementations a decoder uses; the defaults are the references of this file.

    linear: (x [T, in], weight [out, in], bias [out] or None) -> [T, out]; a batch-invariant GEMM goes here.
    """

    linear: Linear = F.linear
    rms_norm: Callable[[Tensor, Tensor, float, float], Tensor] = rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]] = add_rms_norm
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate
    gate: Callable[[Tensor, str], Tensor] = gate
    mix_experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str], Tensor] = mix_experts
