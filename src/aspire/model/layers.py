"""The operations between attentions, as torch reference and as one swappable bundle (ModelOps).

Letters: T tokens, H query heads, K KV heads, D head dim, E experts, A active experts, I intermediate size.
Every function is pure and, on CUDA, free of host synchronisation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire.ops.gate.reference import gate
from aspire.ops.rms_norm.reference import add_rms_norm, rms_norm
from aspire.ops.rotate.reference import rotate

Linear = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


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
    """rows [R, in] times weight[e].T for the rows [ends[e - 1], ends[e]); weight [E, out, in]."""
    if not rows.is_cuda:
        return grouped_loop(rows, weight, ends)
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0  # 16 bytes, which the grouped GEMM asks for
    if rows.dtype == torch.bfloat16 and aligned:
        return grouped_gemm(rows, weight, ends)
    return grouped_masked(rows, weight, ends)


def grouped_gemm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One kernel that reads the group ends on the device."""
    return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def grouped_loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One GEMM per expert that has rows; reads the group ends on the host, so for the CPU."""
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = F.linear(rows[start:end], weight[expert])
        start = end
    return out


def grouped_masked(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same for dtypes without a grouped GEMM: every expert multiplies all rows. Slow, exact, no host sync."""
    owner = torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device, dtype=ends.dtype), right=True)
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    for expert in range(weight.shape[0]):
        out = torch.where((owner == expert)[:, None], F.linear(rows, weight[expert]), out)
    return out


@dataclass(frozen=True, slots=True)
class ModelOps:
    """The implementations a decoder uses; the defaults are torch references, for any device.

    linear: (x [T, in], weight [out, in], bias [out] or None) -> [T, out]; a batch-invariant GEMM goes here.
    """

    linear: Linear = F.linear
    rms_norm: Callable[[Tensor, Tensor, float, float], Tensor] = rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]] = add_rms_norm
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate
    gate: Callable[[Tensor, str], Tensor] = gate
    mix_experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str], Tensor] = mix_experts
