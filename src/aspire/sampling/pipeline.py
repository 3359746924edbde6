"""LogitsPipeline: the one place where logits change between the model and the sampler, for draft and target alike.

Hot file: nothing here may depend on whether a row drafts or verifies.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from aspire.request import Request, SamplingParams
from aspire.sampling.bad_words import BadWords, bad_word_ids
from aspire.sampling.bias import LogitBias, MinTokens
from aspire.sampling.mask import apply_bitmask
from aspire.sampling.penalties import Penalties
from aspire.sampling.rows import PickRows


class Adjustment(Protocol):
    """One step of the pipeline; keeps its state per slot on the device."""

    def wanted(self, params: SamplingParams) -> bool: ...

    def admit(self, slot: int, request: Request) -> None: ...

    def apply(self, logits: Tensor, rows: PickRows) -> Tensor: ...


class LogitsPipeline:
    """Adjusts logits in vLLM's order: grammar mask, bad words, min_tokens, logit bias, repetition, frequency and
    presence penalties. (Temperature, min-p, top-k, top-p and the noise follow in the sampler.)

    All state is device truth: what a verification emitted is counted in the same step, before the host knows it, so
    the pipeline works in the overlapped loop. Only the grammar mask comes from the host. Slots are [0, num_slots];
    the last one is scratch.
    """

    def __init__(self, num_slots: int, vocab_size: int, *, eos_token_ids: Sequence[int], tokenizer: Any,
                 device: torch.device) -> None:
        size = num_slots + 1
        self._tokenizer = tokenizer
        self._bad_words = BadWords(size, tokenizer, device=device)
        self._penalties = Penalties(size, vocab_size, device=device)
        self._adjustments: tuple[Adjustment, ...] = (
            self._bad_words, MinTokens(size, tuple(eos_token_ids), device=device), LogitBias(size, device=device),
            self._penalties)
        self._users: list[set[int]] = [set() for _ in self._adjustments]  # per adjustment: slots that it changes

    def check(self, params: SamplingParams) -> None:
        """ValueError for what only shows with the model's tokenizer at hand."""
        bad_word_ids(self._tokenizer, params.banned_words)

    def admit(self, slot: int, request: Request) -> None:
        """The slot now belongs to the request, whose output so far (after a preemption) counts."""
        for adjustment, users in zip(self._adjustments, self._users, strict=True):
            wanted, was_user = adjustment.wanted(request.params), slot in users
            users.discard(slot)
            if wanted:
                users.add(slot)
            if wanted or was_user:  # others find it as it was made, without effect
                adjustment.admit(slot, request)

    def needed(self, slots: Sequence[int]) -> bool:
        """Whether any of these slots has something to adjust; else `apply` and `commit` may be left out."""
        return any(users and not users.isdisjoint(slots) for users in self._users)

    def apply(self, logits: Tensor, rows: PickRows, slots: Sequence[int], bitmask: Tensor | None = None) -> Tensor:
        """Adjusted float32 logits [N, V]; the argument is not changed, and rows without adjustments keep their bits.

        slots: host's list of the slots that occur in rows. bitmask: int32 [N, ceil(V / 32)] of allowed tokens."""
        if bitmask is not None:
            logits = apply_bitmask(logits, bitmask)
        for adjustment, users in zip(self._adjustments, self._users, strict=True):
            if not users.isdisjoint(slots):
                logits = adjustment.apply(logits, rows)
        return logits

    def commit(self, slot: Tensor, tokens: Tensor, num_tokens: Tensor, slots: Sequence[int]) -> None:
        """tokens[r, : num_tokens[r]] were emitted by slot[r]: int64 [R], [R, K + 1], [R]. A slot that belongs to a
        request occurs at most once. slots: host's list of the slots that occur."""
        for tracker in (self._bad_words, self._penalties):
            users = self._users[self._adjustments.index(tracker)]
            if not users.isdisjoint(slots):
                tracker.commit(slot, tokens, num_tokens)
