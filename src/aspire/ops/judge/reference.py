"""Verdicts in torch: how many drafts a verification accepts. Knows nothing of requests or slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.ops.locate.values import StepInputs
from aspire.ops.sample.noise import noise, noise_words, uniform
from aspire.ops.sample.reference import probabilities, sample
from aspire.ops.sample.rows import STREAM_ACCEPT, STREAM_RESIDUAL, Picks, SamplingRows


def judge(picks: Picks, inputs: StepInputs, tokens: Tensor) -> Tensor:
    """A step's verdicts under shared noise, int32 [R, K + 3]: a row's K + 1 picks, how many drafts it accepts, and the
    bits of a float32, the margin of its first pick, NaN when that of any of its picks is.

    picks: of all N rows of logits. tokens: int64 [S, K + 1] of the slots: last known token, drafts.
    """
    chosen = picks.token[inputs.pick_index]  # [R, K + 1]
    accepted = leading_agreement(chosen, tokens[inputs.slot, 1:], num_verified(inputs))
    margins = picks.margin[inputs.pick_index]
    return pack_verdicts(chosen, accepted, torch.where(margins.isnan().any(1), torch.nan, margins[:, 0]))


def pack_verdicts(picks: Tensor, num_accepted: Tensor, margin: Tensor) -> Tensor:
    """picks int [R, K + 1], num_accepted int [R], margin float32 [R] -> int32 [R, K + 3], one copy to the host."""
    return torch.cat([picks.int(), num_accepted.int()[:, None], margin.view(torch.int32)[:, None]], dim=1)


def num_verified(inputs: StepInputs) -> Tensor:
    """Drafts that each row verifies, int32 [R]: none for prefill and sparse rows."""
    return torch.where((inputs.decode == 1) & (inputs.sparse == 0), inputs.num_drafted, 0)


def leading_agreement(picks: Tensor, drafts: Tensor, num_drafted: Tensor) -> Tensor:
    """Accepted drafts per row, int32 [R]: the leading run in which draft and target pick agree.

    picks: int64 [R, K + 1], the target's picks at the drafts' positions and after the last one; drafts: int64 [R, K];
    num_drafted: int [R] in [0, K]. Entries past num_drafted are not looked at. The row emits
    picks[:, : accepted + 1].
    """
    limit = drafts.shape[1]
    index = torch.arange(limit, device=drafts.device)  # [K]
    agrees = (picks[:, :limit] == drafts) & (index < num_drafted.unsqueeze(1))  # [R, K]
    return agrees.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class RejectionVerdict:
    """tokens[:, : num_accepted + 1] are emitted: the accepted drafts, then the recovered or bonus token."""

    num_accepted: Tensor  # int32 [R]
    tokens: Tensor  # int64 [R, K + 1]; 0 past num_accepted


def judge_rejection(logits: Tensor, rows: SamplingRows, drafts: Tensor, draft_probs: Tensor,
                    num_drafted: Tensor) -> RejectionVerdict:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1): the emitted tokens are distributed as
    the target's, whatever the draft distribution.

    logits: float32 [R, K + 1, V] of the target. rows: sampling values of the R * (K + 1) rows, flattened row-major.
    drafts: int64 [R, K], sampled from draft_probs float32 [R, K, V] with noise of STREAM_DRAFT.
    Draft, accept test and residual have streams of their own: with a shared one the accepted tokens would be those
    whose noise is high, and the output biased. The bonus token, and a row without drafts, use STREAM_TARGET, as plain
    decoding does.
    """
    num_rows, width, vocab = logits.shape
    limit = width - 1
    flat = logits.reshape(-1, vocab)
    target_probs = probabilities(flat, rows).view(num_rows, width, vocab)
    target_picks = sample(flat, rows).token.view(num_rows, width)

    at = drafts.unsqueeze(-1)  # [R, K, 1]
    chance = uniform(noise_words(rows.seed, rows.position, 1, STREAM_ACCEPT)).view(num_rows, width)[:, :limit]
    passes = chance * draft_probs.gather(2, at).squeeze(-1) < target_probs[:, :limit].gather(2, at).squeeze(-1)
    index = torch.arange(limit, device=drafts.device)
    accepted = (passes & (index < num_drafted.unsqueeze(1))).int().cumprod(dim=1)
    num_accepted = accepted.sum(dim=1, dtype=torch.int32)

    residual = (target_probs[:, :limit] - draft_probs).clamp(min=0.0)  # [R, K, V]
    gumbels = noise(rows.seed, rows.position, vocab, STREAM_RESIDUAL).view(num_rows, width, vocab)[:, :limit]
    recovered = (residual.log() + gumbels).argmax(dim=2)  # [R, K]
    # Equal distributions leave no residual; a rejection by rounding then takes the target's own pick.
    recovered = torch.where(residual.amax(dim=2) > 0, recovered, target_picks[:, :limit])

    column = torch.arange(width, device=drafts.device)
    padded = torch.cat([drafts, torch.zeros_like(num_accepted.long()).unsqueeze(1)], dim=1)
    recovered = torch.cat([recovered, target_picks[:, limit:]], dim=1)
    last = torch.where(column < num_drafted.unsqueeze(1), recovered, target_picks)
    stop = num_accepted.unsqueeze(1)
    tokens = torch.where(column < stop, padded, torch.where(column == stop, last, torch.zeros_like(padded)))
    return RejectionVerdict(num_accepted=num_accepted, tokens=tokens)
