"""CUDA graphs of whole decoding steps, one per bucket of token and row counts.

Sparse or full, draft or verify is data, so the same graph serves every mix. Steps with prefill chunks, penalties,
grammars or logprobs run without a graph.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.runtime.batch import Batch, BatchBuilder, StepShape
from aspire.runtime.judges import Outcome
from aspire.runtime.sampling import Mode
from aspire.schedule.plan import StepPlan

Step = Callable[[Batch, Mode], Outcome]


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a captured graph was made for."""

    tokens: int
    rows: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    packed: Tensor  # int64, the graph's input
    outcome: Outcome  # the graph's output, overwritten by every replay


def token_buckets(most: int) -> tuple[int, ...]:
    """Token counts to capture for: fine where a step is bound by weights, coarser where tokens cost time anyway."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 32), *range(512, most + 64, 64)]
    return tuple(size for size in sizes if size < most) + (most,)


def row_buckets(most: int) -> tuple[int, ...]:
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    return tuple(size for size in sizes if size < most) + (most,)


class StepGraphs:
    """Captures on first use; `capture` does so ahead. Graphs share one memory pool."""

    def __init__(self, step: Step, builder: BatchBuilder, *, max_rows: int, max_tokens: int, max_kv_len: int) -> None:
        self._step = step
        self._builder = builder
        self._rows = row_buckets(max_rows)
        self._tokens = token_buckets(max_tokens)
        self._max_kv_len = max_kv_len
        self._captured: dict[Bucket, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, plan: StepPlan, mode: Mode) -> Outcome | None:
        """The outcome, valid until the next run; None when no bucket fits the plan."""
        if any(row.tokens for row in plan.rows) or plan.num_tokens > self._tokens[-1]:
            return None
        lists, shape = self._builder.collect(plan)
        bucket = Bucket(self._tokens[bisect_left(self._tokens, shape.tokens)],
                        self._rows[bisect_left(self._rows, shape.rows)], mode)
        padded = self._shape(bucket)
        if shape.updates > padded.updates:
            return None
        captured = self._captured.get(bucket) or self._capture(bucket)
        host = self._builder.pack(lists, padded)
        captured.packed.copy_(host.pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.outcome

    def capture(self, modes: Sequence[Mode], advance: Callable[[int], None]) -> None:
        """Capture all buckets of full batches, largest first; advance(1) after each."""
        for bucket in self.buckets(modes):
            if bucket not in self._captured:
                self._capture(bucket)
            advance(1)

    def buckets(self, modes: Sequence[Mode]) -> list[Bucket]:
        """What `capture` captures: every token count, with the largest row count that can have it."""
        found = []
        for mode in modes:
            for tokens in reversed(self._tokens):
                for rows in self._rows:
                    if rows <= tokens and (rows == self._rows[-1] or 2 * rows > tokens):
                        found.append(Bucket(tokens, rows, mode))
        return found

    def _shape(self, bucket: Bucket) -> StepShape:
        layout = self._builder.layout
        scores = bucket.rows if layout.scoring_queries else 0
        return StepShape(
            tokens=bucket.tokens, rows=bucket.rows, picks=bucket.tokens, verify_probes=scores,
            draft_probes=scores if layout.scores_drafts else 0, updates=4 * bucket.rows,
            max_query_len=layout.draft_limit + 1, max_kv_len=self._max_kv_len)

    @torch.inference_mode()
    def _capture(self, bucket: Bucket) -> _Captured:
        shape = self._shape(bucket)
        empty, _ = self._builder.collect(StepPlan(0, ()))
        packed = self._builder.pack(empty, shape).to(self._builder.device)  # padding only: touches the scratch slot
        batch = Batch(self._builder.unpack(packed, shape), shape)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(batch, bucket.mode)  # compiles kernels, which a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = self._step(batch, bucket.mode)
        captured = _Captured(graph, packed, outcome)
        self._captured[bucket] = captured
        return captured
