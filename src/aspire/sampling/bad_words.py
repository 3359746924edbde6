"""bad_words: token runs that must not come out. The last token of a run is banned where the tokens before it match."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aspire.request import Request, SamplingParams
from aspire.sampling.rows import PickRows, ban, last_tokens

ANY = -1  # in a prefix: any token, none too
NONE = -2  # in the history: before the first output token

TokenRun = tuple[int, ...]


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> tuple[TokenRun, ...]:
    """Token runs to ban. Each word at the start of a text and, where it takes as many tokens but another first one,
    after a space (vLLM's rule). Raises ValueError when there is no tokenizer."""
    if words and tokenizer is None:
        raise ValueError(f"bad_words need a tokenizer, got bad_words={list(words)!r} and none")
    runs: list[TokenRun] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if bare:
            runs.append(bare)
        if spaced and (not bare or (spaced[0] != bare[0] and len(spaced) == len(bare))):
            runs.append(spaced)
    return tuple(runs)


class BadWords:
    """Per slot: the runs, and the last output tokens they are compared with. Tables grow with the first requests that
    need more room. W runs, H tokens of history (longest run minus 1)."""

    def __init__(self, num_slots: int, tokenizer: Any, *, device: torch.device) -> None:
        self.tokenizer = tokenizer
        self.prefix = torch.full((num_slots, 1, 0), ANY, dtype=torch.int64, device=device)  # [S, W, H] right-aligned
        self.last = torch.zeros(num_slots, 1, dtype=torch.int64, device=device)  # [S, W]
        self.used = torch.zeros(num_slots, 1, dtype=torch.bool, device=device)  # [S, W]
        self.recent = torch.full((num_slots, 0), NONE, dtype=torch.int64, device=device)  # [S, H] right-aligned

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return bool(params.bad_words)

    def admit(self, slot: int, request: Request) -> None:
        self.used[slot] = False
        if not self.wanted(request.params):
            return
        runs = bad_word_ids(self.tokenizer, request.params.banned_words)
        self._grow(len(runs), max((len(run) for run in runs), default=1) - 1)
        device, history = self.prefix.device, self.recent.shape[1]
        self.prefix[slot] = ANY
        for index, run in enumerate(runs):
            self.last[slot, index] = run[-1]
            self.used[slot, index] = True
            if len(run) > 1:
                self.prefix[slot, index, -(len(run) - 1) :] = torch.tensor(run[:-1], device=device)
        self.recent[slot] = NONE
        known = request.output_token_ids[-history:] if history else []
        if known:
            self.recent[slot, -len(known) :] = torch.tensor(known, device=device)

    def apply(self, logits: Tensor, rows: PickRows) -> Tensor:
        last = last_tokens(self.recent[rows.slot], rows.drafts[rows.slot], rows.num_before)  # [N, H]
        prefix = self.prefix[rows.slot]  # [N, W, H]
        match = ((prefix == last.unsqueeze(1)) | (prefix == ANY)).all(dim=2)  # [N, W]
        return ban(logits, self.last[rows.slot], match & self.used[rows.slot])

    def commit(self, slot: Tensor, tokens: Tensor, num_tokens: Tensor) -> None:
        """tokens[r, : num_tokens[r]] join the output of slot[r]; [R], [R, K + 1], [R]."""
        self.recent[slot] = last_tokens(self.recent[slot], tokens, num_tokens)

    def _grow(self, runs: int, history: int) -> None:
        slots, old_runs, old_history = self.prefix.shape
        runs, history = max(runs, old_runs), max(history, old_history)
        if (runs, history) == (old_runs, old_history):
            return
        device = self.prefix.device
        prefix = torch.full((slots, runs, history), ANY, dtype=torch.int64, device=device)
        last = torch.zeros(slots, runs, dtype=torch.int64, device=device)
        used = torch.zeros(slots, runs, dtype=torch.bool, device=device)
        recent = torch.full((slots, history), NONE, dtype=torch.int64, device=device)
        prefix[:, :old_runs, history - old_history :] = self.prefix
        last[:, :old_runs], used[:, :old_runs] = self.last, self.used
        recent[:, history - old_history :] = self.recent
        self.prefix, self.last, self.used, self.recent = prefix, last, used, recent
