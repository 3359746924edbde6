"""What is left of a step when some backend has taken part of its queries, as a smaller step with the same rows.

Letters: T query tokens of the step, U of them left, H query heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aspire.attention.protocol import AttentionBackend
from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection


@dataclass(frozen=True, slots=True)
class Rest:
    """The queries left, and their rows; `attend` puts their results among the others."""

    tokens: Tensor  # int64 [U]
    place: Tensor  # int64 [T]: index in `tokens`, -1: taken
    rows: AttentionRows

    def attend(self, backend: AttentionBackend, query: Tensor, caches: tuple[Tensor, Tensor],
               selection: RowSelection | None, options: AttentionOptions, probe: Probe | None,
               out: Tensor) -> Tensor | None:
        """query, out: [T, H, D] of the whole step. Returns the log-sum-exp [T, H] if there is a probe."""
        if not len(self.tokens):
            assert probe is None, "probed queries are not taken"
            return None
        some, some_lse = backend.attend(query[self.tokens], *caches, self.rows, selection, options,
                                        None if probe is None else self._probe(probe))
        out[self.tokens] = some
        if some_lse is None:
            return None
        lse = torch.empty(query.shape[:2], dtype=some_lse.dtype, device=query.device)
        lse[self.tokens] = some_lse
        return lse

    def _probe(self, probe: Probe) -> Probe:
        """The probe by places in `tokens`."""
        token = torch.where(probe.token >= 0, self.place[probe.token.clamp(min=0).long()], -1)
        return Probe(token.int(), probe.row, probe.logits)


def leave(rows: AttentionRows, num_queries: Sequence[int], taken: Sequence[int], num_tokens: int) -> Rest:
    """The step without the first taken[r] queries of each row r of num_queries[r]; padding tokens stay."""
    starts = starts_of(num_queries)
    lengths = [count - gone for count, gone in zip(num_queries, taken, strict=True)]
    kept: list[int] = []
    for begin, gone, length in zip(starts, taken, lengths, strict=False):
        kept += range(begin + gone, begin + gone + length)
    kept += range(starts[-1], num_tokens)
    device = rows.query_start.device
    tokens = to_device(kept, torch.int64, device)
    place = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    place[tokens] = torch.arange(len(kept), device=device)
    host = tuple(row._replace(num_queries=length) for row, length in zip(rows.host, lengths, strict=False))
    smaller = replace(rows, query_start=to_device(starts_of(lengths), torch.int32, device),
                      max_query_len=max(1, *lengths), host=host)
    return Rest(tokens, place, smaller)


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Running sums from 0, one more than lengths."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy that nobody waits for."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
