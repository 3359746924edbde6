"""Rotary frequencies of every supported scaling, and the cosines and sines of a batch of positions.

Two scalings depend on the sequence length: dynamic NTK recomputes its base as the sequence grows, longrope switches
factor lists when it passes the pretraining length. Keys are cached after rotation and their scores must agree with
later queries, so an engine uses ONE set of frequencies: that of a sequence as long as its max_model_len (vLLM does
the same). The result equals transformers for a sequence of that length processed in one piece, and is at least
self-consistent for shorter ones; lower max_model_len to the pretraining length to get the unscaled frequencies.
"""

import math

import torch
from torch import Tensor

from aspire.model.spec import RopeSpec


def inverse_frequencies(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [dim / 2], and the factor on cosines and sines, for sequences up to `length`.

    linear: positions / factor. dynamic: NTK-aware base for `length`. yarn: arXiv 2309.00071, 3.2 to 3.4. llama3: as
    published with Llama 3.1. longrope: arXiv 2402.13753, long or short factors by `length`.
    """
    if spec.kind == "linear":
        return _plain(spec.theta, spec.dim) / spec.factor, 1.0
    if spec.kind == "dynamic":
        return _plain(_dynamic_theta(spec, length), spec.dim), 1.0
    if spec.kind == "llama3":
        return _llama3(spec), 1.0
    if spec.kind == "yarn":
        return _yarn(spec), _yarn_attention_factor(spec)
    if spec.kind == "longrope":
        factors = spec.long_factor if length > spec.original_max_position else spec.short_factor
        plain = _powers(spec.theta, spec.dim)
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * plain), _longrope_attention_factor(spec)
    return _plain(spec.theta, spec.dim), 1.0


def _powers(theta: float, dim: int) -> Tensor:
    return theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)  # [dim / 2]


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / _powers(theta, dim)


def _dynamic_theta(spec: RopeSpec, length: int) -> float:
    longest = max(length, spec.max_position)
    growth = spec.factor * longest / spec.max_position - (spec.factor - 1)
    return float(spec.theta * growth ** (spec.dim / (spec.dim - 2)))


def _llama3(spec: RopeSpec) -> Tensor:
    plain = _plain(spec.theta, spec.dim)
    wavelength = 2 * math.pi / plain
    position = (spec.original_max_position / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor)
    keep = position.clamp(0.0, 1.0)  # 0: long waves, divided by factor; 1: short waves, untouched
    return (1 - keep) * plain / spec.factor + keep * plain


def _yarn(spec: RopeSpec) -> Tensor:
    def dimension(rotations: float) -> float:
        return spec.dim * math.log(spec.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(spec.theta, spec.dim)
    return ramp / (spec.factor * powers) + (1 - ramp) / powers


def _yarn_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


def _longrope_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))


def cos_sin(positions: Tensor, inverse: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, dim / 2] in `dtype`, computed in float32, for positions int64 [T]."""
    angles = positions[:, None].float() * inverse  # [T, dim / 2]
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
