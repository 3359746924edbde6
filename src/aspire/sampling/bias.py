"""logit_bias, and the ban on stop tokens before min_tokens: short lists of token ids per slot."""

import torch
from torch import Tensor

from aspire.request import Request, SamplingParams
from aspire.sampling.rows import PickRows, ban


def widen(table: Tensor, width: int, fill: float) -> Tensor:
    """[S, W] with more columns on the right."""
    grown = torch.full((table.shape[0], width), fill, dtype=table.dtype, device=table.device)
    grown[:, : table.shape[1]] = table
    return grown


class LogitBias:
    """Adds a value to some tokens' logits."""

    def __init__(self, num_slots: int, *, device: torch.device) -> None:
        self.token = torch.zeros(num_slots, 1, dtype=torch.int64, device=device)  # [S, B]
        self.value = torch.zeros(num_slots, 1, device=device)  # [S, B], 0 at unused places

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def admit(self, slot: int, request: Request) -> None:
        self.value[slot] = 0.0
        bias = sorted((request.params.logit_bias or {}).items())
        if not bias:
            return
        if len(bias) > self.token.shape[1]:
            self.token = widen(self.token, len(bias), 0)
            self.value = widen(self.value, len(bias), 0.0)
        self.token[slot, : len(bias)] = torch.tensor([token for token, _ in bias])
        self.value[slot, : len(bias)] = torch.tensor([float(value) for _, value in bias])

    def apply(self, logits: Tensor, rows: PickRows) -> Tensor:
        return logits.scatter_add(1, self.token[rows.slot], self.value[rows.slot])


class MinTokens:
    """No stop token (EOS or stop_token_ids) before min_tokens were put out.

    A grammar comes first: where it allows nothing but the end, the output ends.
    """

    def __init__(self, num_slots: int, eos_token_ids: tuple[int, ...], *, device: torch.device) -> None:
        self.eos_token_ids = eos_token_ids
        self.token = torch.zeros(num_slots, 1, dtype=torch.int64, device=device)  # [S, M]
        self.used = torch.zeros(num_slots, 1, dtype=torch.bool, device=device)  # [S, M]
        self.until = torch.zeros(num_slots, dtype=torch.int64, device=device)  # [S] first position that may stop

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return params.min_tokens > 0 and params.structured_outputs is None

    def admit(self, slot: int, request: Request) -> None:
        self.until[slot] = 0
        params = request.params
        stops = list(dict.fromkeys([*self.eos_token_ids, *params.stop_ids]))
        if not self.wanted(params) or not stops:
            return
        if len(stops) > self.token.shape[1]:
            self.token = widen(self.token, len(stops), 0)
            self.used = widen(self.used, len(stops), 0)
        self.until[slot] = request.num_prompt + params.min_tokens
        self.used[slot] = False
        self.used[slot, : len(stops)] = True
        self.token[slot, : len(stops)] = torch.tensor(stops)

    def apply(self, logits: Tensor, rows: PickRows) -> Tensor:
        early = rows.position < self.until[rows.slot]
        return ban(logits, self.token[rows.slot], self.used[rows.slot] & early.unsqueeze(1))
