"""Presence, frequency and repetition penalties from token counts that live on the device."""

import torch
from torch import Tensor

from aspire.request import Request, SamplingParams
from aspire.sampling.rows import PickRows


class Penalties:
    """Per slot: how often each token was put out, and which tokens the prompt holds.

    Counts cover the committed output; the drafts before a row are added when the row is priced, so a draft row and
    the verification of its position see the same counts. The two [S, V] tables are made with the first request that
    needs them.
    """

    def __init__(self, num_slots: int, vocab_size: int, *, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.presence = torch.zeros(num_slots, device=device)
        self.frequency = torch.zeros(num_slots, device=device)
        self.repetition = torch.ones(num_slots, device=device)
        self.output_count = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1

    def admit(self, slot: int, request: Request) -> None:
        """Also after a preemption: the output so far counts."""
        params = request.params
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        if not self.wanted(params):
            return
        if not len(self.output_count):
            shape, device = (len(self.presence), self.vocab_size), self.presence.device
            self.output_count = torch.zeros(shape, dtype=torch.int32, device=device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        device = self.presence.device
        output = torch.tensor(request.output_token_ids, dtype=torch.int64, device=device)
        self.output_count[slot] = torch.bincount(output, minlength=self.vocab_size).int()
        self.in_prompt[slot] = False
        self.in_prompt[slot, torch.tensor(request.prompt_token_ids, dtype=torch.int64, device=device)] = True

    def apply(self, logits: Tensor, rows: PickRows) -> Tensor:
        """Repetition (prompt and output): positive logits over, negative times the penalty (arXiv 1909.05858, with
        the sign rule of vLLM and transformers). Then frequency times count, then presence, output only (OpenAI)."""
        limit = rows.drafts.shape[1]
        counts = self.output_count[rows.slot]  # int32 [N, V]
        if limit:
            before = torch.arange(limit, device=logits.device) < rows.num_before.unsqueeze(1)  # [N, K]
            counts = counts.scatter_add(1, rows.drafts[rows.slot], before.int())
        used = counts > 0
        repetition = torch.where(used | self.in_prompt[rows.slot], self.repetition[rows.slot].unsqueeze(1), 1.0)
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = logits - self.frequency[rows.slot].unsqueeze(1) * counts
        return logits - self.presence[rows.slot].unsqueeze(1) * used

    def commit(self, slot: Tensor, tokens: Tensor, num_tokens: Tensor) -> None:
        """tokens[r, : num_tokens[r]] join the output of slot[r]; [R], [R, K + 1], [R]."""
        counted = torch.arange(tokens.shape[1], device=tokens.device) < num_tokens.unsqueeze(1)
        flat = slot.unsqueeze(1) * self.vocab_size + tokens
        self.output_count.view(-1).index_add_(0, flat.flatten(), counted.int().flatten())

