"""Noise addressed by (seed, position, token id, stream): Philox4x32-10 words and Gumbel values, in plain torch.

Every float operation here is a single correctly rounded add or multiply (or a bit move), so that the Triton kernel,
compiled without contraction into FMAs, gives the same bits, and so do a row alone and a row in a batch.
"""

import torch
from torch import Tensor

PHILOX_M0 = 0xD2511F53
PHILOX_M1 = 0xCD9E8D57
PHILOX_W0 = 0x9E3779B9
PHILOX_W1 = 0xBB67AE85
MASK32 = 0xFFFFFFFF
SQRT_HALF = 0.70710678118654752
LN2_HIGH = 0.693359375  # exact in 10 bits, so that exponent * LN2_HIGH is exact
LN2_LOW = -2.12194440e-4
# Minimax polynomial of (log(1 + f) - f + f^2 / 2) / f^3 on [sqrt(1/2) - 1, sqrt(2) - 1]: Cephes, logf.c.
LOG_POLY = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
            2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
# Minimax polynomial of (exp(r) - 1 - r) / r^2 on [-ln(2) / 2, ln(2) / 2]: Cephes, expf.c.
EXP_POLY = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LOG2_E = 1.44269504088896341
EXP_FLOOR = -87.0  # below, exp is taken as 0


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter, as int64 tensors in [0, 2^32); arguments likewise, broadcast together.

    Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap, which leaves all 64 bits of the unsigned product in place.
        product0 = c0 * PHILOX_M0
        product1 = c2 * PHILOX_M1
        c0, c1, c2, c3 = (((product1 >> 32) & MASK32) ^ c1 ^ k0, product1 & MASK32,
                          ((product0 >> 32) & MASK32) ^ c3 ^ k1, product0 & MASK32)
        k0 = (k0 + PHILOX_W0) & MASK32
        k1 = (k1 + PHILOX_W1) & MASK32
    return c0, c1, c2, c3


def noise_words(seed: Tensor, position: Tensor, count: int, stream: int = 0) -> Tensor:
    """Words for the token ids [0, count) of every row: int64 [N, count] in [0, 2^32). seed, position: int64 [N].

    Key: the seed's 64 bits. Counter: (token id // 4, position, stream, 0); its four words serve four token ids.
    """
    groups = torch.arange((count + 3) // 4, device=seed.device).unsqueeze(0)  # [1, G]
    where = (position & MASK32).unsqueeze(1)  # [N, 1]
    zero = torch.zeros_like(where)
    key = ((seed & MASK32).unsqueeze(1), ((seed >> 32) & MASK32).unsqueeze(1))
    words = philox((groups, where, zero + stream, zero), key)
    shape = (seed.shape[0], groups.shape[1])
    return torch.stack([word.expand(shape) for word in words], dim=-1).flatten(1)[:, :count]


def uniform(words: Tensor) -> Tensor:
    """float32 in [2^-33, 1 - 2^-24] from 32-bit words; small values keep full relative precision."""
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel values float32 from 32-bit words: -log(-log(1 - u)), within [-2.82, 22.88]."""
    u = uniform(words)
    # log(1 - u) straight from u where it is small: that tail decides which of many unlikely tokens wins.
    small = u < 1 - SQRT_HALF
    exponent, fraction = _split(1 - u)
    log_survival = _log_parts(torch.where(small, torch.zeros_like(u), exponent), torch.where(small, -u, fraction))
    return -log32(-log_survival)


def noise(seed: Tensor, position: Tensor, vocab_size: int, stream: int = 0) -> Tensor:
    """Gumbel noise float32 [N, V] of every token id; a pure function of (seed, position, token id, stream)."""
    return gumbel(noise_words(seed, position, vocab_size, stream))


def log32(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float32 values, the same bits everywhere; error about 1 ulp."""
    return _log_parts(*_split(x))


def exp32(x: Tensor) -> Tensor:
    """exp of float32 values <= 0, the same bits everywhere; 0 below EXP_FLOOR; error about 1 ulp."""
    clamped = x.clamp(min=EXP_FLOOR, max=0.0)
    power = torch.floor(clamped * LOG2_E + 0.5)
    r = clamped - power * LN2_HIGH - power * LN2_LOW
    value = torch.full_like(r, EXP_POLY[0])
    for coefficient in EXP_POLY[1:]:
        value = value * r + coefficient
    value = value * (r * r) + r + 1.0
    scale = ((power.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < EXP_FLOOR, torch.zeros_like(x), value * scale)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = 2^exponent * (1 + fraction) with 1 + fraction in [sqrt(1/2), sqrt(2)); both float32."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)  # in [1/2, 1)
    low = mantissa < SQRT_HALF
    exponent = torch.where(low, exponent - 1, exponent)
    return exponent.float(), torch.where(low, mantissa + mantissa, mantissa) - 1.0


def _log_parts(exponent: Tensor, fraction: Tensor) -> Tensor:
    """log(2^exponent * (1 + fraction))."""
    square = fraction * fraction
    value = torch.full_like(fraction, LOG_POLY[0])
    for coefficient in LOG_POLY[1:]:
        value = value * fraction + coefficient
    value = value * fraction * square + exponent * LN2_LOW - square * 0.5
    return fraction + value + exponent * LN2_HIGH
