"""Log probabilities of emitted and prompt tokens. Always the target's, of the logits as the model gave them (vLLM's
"raw_logprobs"): penalties, masks and temperature do not count."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.schedule.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """On the device; letters: M tokens, L top entries."""

    token: Tensor  # int64 [M]
    logprob: Tensor  # float32 [M]
    rank: Tensor  # int64 [M], 1: no token is likelier
    top_token: Tensor  # int64 [M, L], best first, ties by lower id
    top_logprob: Tensor  # float32 [M, L]

    def to_host(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One value per row; row i shows its num_top[i] <= L best. Waits for the device."""
        token, logprob, rank = self.token.tolist(), self.logprob.tolist(), self.rank.tolist()
        tops = [list(zip(ids, values, strict=True))
                for ids, values in zip(self.top_token.tolist(), self.top_logprob.tolist(), strict=True)]
        return [TokenLogprobs(token_id=token[i], logprob=logprob[i], top=tuple(tops[i][: num_top[i]]), rank=rank[i])
                for i in range(len(token))]


def token_logprobs(logits: Tensor, token: Tensor, num_top: int) -> LogprobRows:
    """Log-softmax of raw logits [M, V] at token [M] and at the `num_top` likeliest. Rows do not depend on each other.

    rank counts the tokens that are strictly likelier, plus 1."""
    logprobs = torch.log_softmax(logits.float(), dim=1)
    chosen = logprobs.gather(1, token.unsqueeze(1))  # [M, 1]
    rank = (logprobs > chosen).sum(dim=1) + 1
    values, ids = _top(logprobs, min(num_top, logprobs.shape[1]))
    return LogprobRows(token, chosen.squeeze(1), rank, ids, values)


def _top(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest per row, ties by lower id: float32 and int64 [M, count].

    topk alone orders ties as it likes, and low-precision logits tie often; so it sorts integers that hold the value's
    order above and the id below.
    """
    bits = (logprobs + 0.0).view(torch.int32)  # + 0.0: one zero only
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    keys = ((order << 32) + (0x7FFFFFFF - ids)).topk(count, dim=1).values
    top = 0x7FFFFFFF - (keys & 0xFFFFFFFF)
    return logprobs.gather(1, top), top
