"""Sampling in torch: the CPU backend and the oracle of the Triton kernel.

A row's result is built from elementwise operations, exact integer sums, sorts and maxima only, so it never depends
on the other rows of the batch or on their number.
"""

import torch
from torch import Tensor

from aspire.ops.sample.noise import exp32, gumbel, log32, noise_words, uniform
from aspire.ops.sample.rows import Picks, SamplingRows

MASS_SCALE = 2.0**40  # fixed point of probability masses: the sum over a vocabulary of 2^22 still fits int64
ROUGH_ERROR = 1e-3
MIN_TEMPERATURE = 1e-6  # of the filters only: keeps 1 / T finite


def sample(logits: Tensor, rows: SamplingRows) -> Picks:
    """Pick a token per row: argmax of logits + temperature * Gumbel(seed, position, token id) over the allowed tokens.

    logits: float32 [N, V], not changed; -inf forbids a token. A row that holds a NaN has no best token: its pick is
    token 0, inside the vocabulary, and its margin NaN. This is argmax(logits / T + Gumbel), a sample of
    softmax(logits / T), written so that T = 0 is plain greedy. Ties go to the lower token id; a row of -inf only
    picks token 0.
    Filters run on the temperature-scaled logits in vLLM's order: min-p, top-k, top-p, each on what the former ones
    left, renormalised. Each keeps the tokens at or above a threshold, so ties at the border all stay.
    """
    allowed = logits
    if rows.mode == "filtered":
        allowed = logits.masked_fill(logits < filter_threshold(logits, rows).unsqueeze(1), -torch.inf)
    score = allowed if rows.mode == "greedy" else perturb(allowed, rows)
    token = score.argmax(dim=1)  # the first of equals
    best = score.gather(1, token.unsqueeze(1))  # [N, 1]
    second = score.scatter(1, token.unsqueeze(1), -torch.inf).amax(dim=1, keepdim=True)
    margin = torch.where(best == -torch.inf, torch.zeros_like(best), best - second).squeeze(1)
    lost = torch.isnan(logits).any(1)
    return Picks(token=torch.where(lost, 0, token), margin=torch.where(lost, torch.nan, margin))


def perturb(logits: Tensor, rows: SamplingRows) -> Tensor:
    """logits + temperature * noise, float32 [N, V], with exact bits wherever the best or the second best can be.

    Elsewhere the noise comes from the library's fast logarithm; it is off by far less than ROUGH_ERROR.
    """
    temperature = rows.temperature.unsqueeze(1)  # [N, 1]
    words = noise_words(rows.seed, rows.position, logits.shape[1], rows.stream)  # int64 [N, V]
    score = uniform(words).neg_().log1p_().neg_().log_().neg_().mul_(temperature).add_(logits)
    second = score.topk(min(2, score.shape[1]), dim=1).values[:, -1:]  # [N, 1]
    slack = ROUGH_ERROR * temperature + 1e-5 * second.abs()
    close = (score >= second - slack) & (logits > -torch.inf)
    row, token = close.nonzero(as_tuple=True)
    score[row, token] = logits[row, token] + rows.temperature[row] * gumbel(words[row, token])
    return score


def filter_threshold(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The smallest logit each row's filters keep, float32 [N]; -inf for rows that keep everything (greedy rows too).

    top-p keeps a token when the tokens above it hold less than top_p of the mass that min-p and top-k left.
    """
    vocab = logits.shape[1]
    ordered = logits.sort(dim=1, descending=True).values  # [N, V]
    best = ordered[:, 0]
    sampled = rows.temperature > 0
    temperature = torch.where(sampled, rows.temperature, torch.ones_like(best)).clamp(min=MIN_TEMPERATURE)
    never = torch.full_like(best, -torch.inf)
    min_p_on = rows.min_p > 0
    cut = best + temperature * log32(torch.where(min_p_on, rows.min_p, torch.ones_like(rows.min_p)))
    threshold = torch.where(min_p_on, cut, never)
    kth = ordered.gather(1, (rows.top_k.long().clamp(1, vocab) - 1).unsqueeze(1)).squeeze(1)
    threshold = torch.where(rows.top_k > 0, torch.maximum(threshold, kth), threshold)

    mass = masses(ordered, best, 1.0 / temperature).masked_fill(ordered < threshold.unsqueeze(1), 0)  # int64 [N, V]
    running = mass.cumsum(dim=1)
    wanted = (rows.top_p.double() * running[:, -1].double()).unsqueeze(1)
    num_kept = ((running - mass).double() < wanted).sum(dim=1).clamp(min=1)
    nucleus = ordered.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1)
    threshold = torch.where(rows.top_p < 1, torch.maximum(threshold, nucleus), threshold)
    return torch.where(sampled, threshold, never)


def masses(logits: Tensor, best: Tensor, inverse: Tensor) -> Tensor:
    """exp((logit - best) * inverse) in fixed point, int64 [N, V], inverse = 1 / temperature: integers add up to the
    same sum in any order."""
    scaled = (logits - best.unsqueeze(1)) * inverse.unsqueeze(1)
    # A row of -inf only gives NaN here; it has no mass.
    return (exp32(scaled.nan_to_num(nan=-torch.inf, neginf=-torch.inf)) * MASS_SCALE).long()


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The distribution that `sample` draws from, float32 [N, V]; one-hot for greedy rows (lower id among ties)."""
    sampled = rows.temperature > 0
    temperature = torch.where(sampled, rows.temperature, torch.ones_like(rows.temperature))
    kept = logits
    if rows.mode == "filtered":
        kept = logits.masked_fill(logits < filter_threshold(logits, rows).unsqueeze(1), -torch.inf)
    probs = torch.softmax(kept / temperature.unsqueeze(1), dim=1)
    greedy = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)
    return torch.where(sampled.unsqueeze(1), probs, greedy)
