"""Triton kernels of the sampler. Float arithmetic repeats noise.py operation by operation; they must be launched with
enable_fp_fusion=False, so that no multiply and add are contracted and the bits stay equal to the reference's.

Letters: N rows, V vocabulary, S parts of it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from aspire.ops.sample import noise

SQRT_HALF = tl.constexpr(noise.SQRT_HALF)
SMALL = tl.constexpr(1 - noise.SQRT_HALF)
LN2_HIGH = tl.constexpr(noise.LN2_HIGH)
LN2_LOW = tl.constexpr(noise.LN2_LOW)
LOG2_E = tl.constexpr(noise.LOG2_E)
EXP_FLOOR = tl.constexpr(noise.EXP_FLOOR)
LOG_POLY = tl.constexpr(noise.LOG_POLY)
EXP_POLY = tl.constexpr(noise.EXP_POLY)
LAST_BELOW_ONE = tl.constexpr(1 - 2.0**-24)
TO_UNIT = tl.constexpr(2.0**-32)
MASS_SCALE = tl.constexpr(2.0**40)


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = mantissa < SQRT_HALF
    exponent = tl.where(low, exponent - 1, exponent)
    return exponent.to(tl.float32), tl.where(low, mantissa + mantissa, mantissa) - 1.0


@triton.jit
def _log_parts(exponent, fraction):
    square = fraction * fraction
    value = fraction * LOG_POLY[0] + LOG_POLY[1]
    for i in tl.static_range(2, 9):
        value = value * fraction + LOG_POLY[i]
    value = value * fraction * square + exponent * LN2_LOW - square * 0.5
    return fraction + value + exponent * LN2_HIGH


@triton.jit
def log32(x):
    exponent, fraction = _split(x)
    return _log_parts(exponent, fraction)


@triton.jit
def exp32(x):
    clamped = tl.maximum(x, EXP_FLOOR)
    power = tl.floor(clamped * LOG2_E + 0.5)
    r = clamped - power * LN2_HIGH - power * LN2_LOW
    value = r * EXP_POLY[0] + EXP_POLY[1]
    for i in tl.static_range(2, 6):
        value = value * r + EXP_POLY[i]
    value = value * (r * r) + r + 1.0
    scale = ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < EXP_FLOOR, 0.0, value * scale)


@triton.jit
def gumbel(words):
    u = tl.minimum((words.to(tl.float32) + 0.5) * TO_UNIT, LAST_BELOW_ONE)
    small = u < SMALL
    exponent, fraction = _split(1.0 - u)
    log_survival = _log_parts(tl.where(small, 0.0, exponent), tl.where(small, -u, fraction))
    return -log32(-log_survival)


@triton.jit
def noise_words(seed, position, first_group, STREAM: tl.constexpr, GROUPS: tl.constexpr):
    """uint32 [4 * GROUPS]: the words of 4 * GROUPS token ids from 4 * first_group on. seed, position: int64 scalars."""
    group = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    zero = tl.zeros((GROUPS,), tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position.to(tl.uint32), zero + STREAM, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (4 * GROUPS,))


@triton.jit
def pick_kernel(
    logits,  # float32 [N, V]
    temperature, threshold,  # float32 [N]
    seed, position,  # int64 [N]
    best_out, token_out, second_out,  # float32, int32, float32 [N, S]
    logits_stride, vocab, STREAM: tl.constexpr, NOISY: tl.constexpr, FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):
    """The best and second best perturbed logit of one part of one row; the best is NaN if any logit is."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * logits_stride + token, mask=token < vocab, other=float("-inf"))
    lost = tl.sum((score != score).to(tl.int32), axis=0) > 0  # a maximum passes over NaN
    if FILTERED:
        score = tl.where(score < tl.load(threshold + row), float("-inf"), score)
    if NOISY:
        t = tl.load(temperature + row)
        if t > 0:
            words = noise_words(tl.load(seed + row), tl.load(position + row), part * (BLOCK // 4), STREAM, BLOCK // 4)
            score = score + t * gumbel(words)
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0)
    second = tl.max(tl.where(token == winner, float("-inf"), score), axis=0)
    at = row * tl.num_programs(1) + part
    tl.store(best_out + at, tl.where(lost, float("nan"), best))
    tl.store(token_out + at, winner)
    tl.store(second_out + at, second)


@triton.jit
def combine_kernel(
    best_in, token_in, second_in,  # float32, int32, float32 [N, S]
    token_out, margin_out,  # int64, float32 [N]
    parts, BLOCK: tl.constexpr,
):
    """From the parts of a row to its pick."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < parts
    best = tl.load(best_in + row * parts + i, mask=inside, other=float("-inf"))
    token = tl.load(token_in + row * parts + i, mask=inside, other=0x7FFFFFFF)
    second = tl.load(second_in + row * parts + i, mask=inside, other=float("-inf"))
    lost = tl.sum((best != best).to(tl.int32), axis=0) > 0
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, token, 0x7FFFFFFF), axis=0)
    runner_up = tl.max(tl.where(token == winner, second, best), axis=0)
    margin = tl.where(top == float("-inf"), 0.0, top - runner_up)
    tl.store(token_out + row, tl.where(lost, 0, winner).to(tl.int64))
    tl.store(margin_out + row, tl.where(lost, float("nan"), margin))


@triton.jit
def _key(x):
    """uint32 in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -0x80000000).to(tl.uint32, bitcast=True)


@triton.jit
def _value(key):
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -0x80000000, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _highest(row_logits, vocab, floor, best, inverse, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest value such that the tokens at or above it number, or weigh (MASS: those at or above `floor` only),
    at least `wanted`: two bits of its key per pass, with integer sums, so that no order of adding matters."""
    found = tl.zeros((), tl.uint32)
    for digit in range(16):
        shift = tl.cast(30 - 2 * digit, tl.uint32)
        one = found | (tl.full((), 1, tl.uint32) << shift)
        two = found | (tl.full((), 2, tl.uint32) << shift)
        three = one | two
        sum1 = tl.zeros((BLOCK,), tl.int64)
        sum2 = tl.zeros((BLOCK,), tl.int64)
        sum3 = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(row_logits + token, mask=token < vocab, other=float("-inf"))
            key = _key(x)
            if MASS:
                weight = (exp32((x - best) * inverse) * MASS_SCALE).to(tl.int64)
                weight = tl.where(x < floor, 0, weight)
            else:
                weight = tl.full((BLOCK,), 1, tl.int64)
            sum1 += tl.where(key >= one, weight, 0)
            sum2 += tl.where(key >= two, weight, 0)
            sum3 += tl.where(key >= three, weight, 0)
        found = tl.where(tl.sum(sum1, axis=0).to(tl.float64) >= wanted, one, found)
        found = tl.where(tl.sum(sum2, axis=0).to(tl.float64) >= wanted, two, found)
        found = tl.where(tl.sum(sum3, axis=0).to(tl.float64) >= wanted, three, found)
    return _value(found)


@triton.jit
def _total_mass(row_logits, vocab, floor, best, inverse, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + token, mask=token < vocab, other=float("-inf"))
        total += tl.where(x < floor, 0, (exp32((x - best) * inverse) * MASS_SCALE).to(tl.int64))
    return tl.sum(total, axis=0)


@triton.jit
def threshold_kernel(
    logits,  # float32 [N, V]
    temperature, inverse, top_p, min_p,  # float32 [N]
    top_k,  # int32 [N]
    out,  # float32 [N]
    logits_stride, vocab, BLOCK: tl.constexpr,
):
    """The smallest logit that the row's filters keep; see filter_threshold in reference.py."""
    row = tl.program_id(0).to(tl.int64)
    t, k = tl.load(temperature + row), tl.load(top_k + row)
    p, m = tl.load(top_p + row), tl.load(min_p + row)
    floor = tl.full((), float("-inf"), tl.float32)
    if (t > 0) & ((k > 0) | (p < 1) | (m > 0)):
        row_logits = logits + row * logits_stride
        running = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            running = tl.maximum(running, tl.load(row_logits + token, mask=token < vocab, other=float("-inf")))
        best = tl.max(running, axis=0)
        if best > float("-inf"):
            scale = tl.load(inverse + row)
            if m > 0:
                floor = best + t * log32(m)
            if k > 0:
                kept = tl.minimum(k, vocab).to(tl.float64)
                floor = tl.maximum(floor, _highest(row_logits, vocab, floor, best, scale, kept, False, BLOCK))
            if p < 1:
                total = _total_mass(row_logits, vocab, floor, best, scale, BLOCK)
                wanted = p.to(tl.float64) * total.to(tl.float64)
                floor = tl.maximum(floor, _highest(row_logits, vocab, floor, best, scale, wanted, True, BLOCK))
    tl.store(out + row, floor)
