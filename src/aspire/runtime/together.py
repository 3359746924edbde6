"""Scores of the layers whose lists nobody reads before the next step: few launches for all of them."""

import torch
from torch import Tensor

from aspire.attention.rows import AttentionRows, Probe
from aspire.runtime.operators import Operators
from aspire.speculation.selection import SelectionConfig

MOST_BYTES = 256 << 20  # of logits kept at a time; launches of few rows wait longer than they work


class ChosenTogether:
    """Keeps the probed logits of several layers and scores these at once.

    windows: sliding window of each such layer, in their order. token: int32 [N, Q], row: int32 [N], the scoring
    queries, as in Probe. A run of layers with the same window is scored when its last layer was attended, or when
    their logits fill MOST_BYTES.
    """

    def __init__(self, windows: tuple[int | None, ...], token: Tensor, row: Tensor, rows: AttentionRows,
                 config: SelectionConfig, operators: Operators) -> None:
        self._rows = rows
        self._windows = windows
        self._token, self._row = token, row
        self._config, self._operators = config, operators
        self._width = probe_width(rows.max_kv_len)
        units = -(-self._width // config.unit)
        self._scores = torch.empty(len(windows), len(row), units, dtype=torch.float32, device=row.device)
        self._logits: Tensor | None = None  # [layers kept at a time, N, Q, H, L]
        self._lse: list[Tensor] = []  # [T, H] of each layer since `_begin`
        self._begin = 0

    def probe(self, query: Tensor) -> Probe:
        """For the next layer. query: [T, H, D]."""
        if self._logits is None:
            shape = (*self._token.shape, query.shape[1], self._width)
            one = torch.Size(shape).numel() * probe_dtype(query.device).itemsize
            kept = max(1, min(MOST_BYTES // max(1, one), len(self._windows)))
            self._logits = torch.empty(kept, *shape, dtype=probe_dtype(query.device), device=query.device)
        return Probe(self._token, self._row, self._logits[len(self._lse)])

    def add(self, lse: Tensor) -> None:
        """lse: float32 [T, H] of the layer that was probed last."""
        assert self._logits is not None, "a layer is probed first"
        self._lse.append(lse)
        end = self._begin + len(self._lse)
        if end < len(self._windows) and len(self._lse) < len(self._logits) and (
                self._windows[end] == self._windows[self._begin]):
            return
        probe = Probe(self._token, self._row, self._logits[: len(self._lse)].flatten(0, 1))
        self._operators.key_scores(probe, torch.cat(self._lse), self._rows, unit=self._config.unit,
                                   reduce=self._config.reduce, window=self._windows[self._begin],
                                   out=self._scores[self._begin : end].flatten(0, 1))
        self._begin = end
        self._lse.clear()

    @property
    def scores(self) -> Tensor:
        """[layers * N, U] once every layer was added."""
        assert self._begin == len(self._windows), "every layer was added"
        return self._scores.flatten(0, 1)


def probe_dtype(device: torch.device) -> torch.dtype:
    """Of kept logits: on a GPU these are bytes that cost."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def probe_width(max_kv_len: int) -> int:
    """Keys of a probe's logits: rows stay aligned."""
    return -(-max_kv_len // 16) * 16
