"""CUDA graphs of whole decoding steps, one per bucket of token and row counts.

Sparse or full, draft or verify is data, so the same graph serves every mix. Steps with prefill chunks, penalties,
grammars or logprobs run without a graph.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.runtime.batch import Batch, BatchBuilder, BatchLayout, Packing, StepShape
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
    packing: Packing
    packed: Tensor  # int32, the graph's input
    outcome: Outcome  # the graph's output, overwritten by every replay


def token_buckets(most: int) -> tuple[int, ...]:
    """Token counts to capture for: fine where a step is bound by weights, coarser where tokens cost time anyway."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 32), *range(512, most + 128, 128)]
    return tuple(size for size in sizes if size < most) + (most,)


def row_buckets(most: int) -> tuple[int, ...]:
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    return tuple(size for size in sizes if size < most) + (most,)


class Buckets:
    """The sizes that steps are padded to. Knows nothing of graphs."""

    def __init__(self, layout: BatchLayout, *, max_rows: int, max_tokens: int, max_kv_len: int) -> None:
        self.rows = row_buckets(max_rows)
        self.tokens = token_buckets(max_tokens)
        self._layout = layout
        self._max_kv_len = max_kv_len

    def fits(self, plan: StepPlan) -> bool:
        """Whether some bucket holds the plan's rows."""
        return bool(plan.rows) and not plan.prefills and plan.num_tokens <= self.tokens[-1]

    def smallest(self, shape: StepShape, mode: Mode) -> Bucket:
        """The bucket for a step that fits."""
        return Bucket(self.tokens[bisect_left(self.tokens, shape.tokens)],
                      self.rows[bisect_left(self.rows, shape.rows)], mode)

    def updates(self, bucket: Bucket) -> int:
        """Changes of block tables that a step of that size may bring."""
        return 4 * bucket.rows

    def shape(self, bucket: Bucket) -> StepShape:
        layout = self._layout
        scores = bucket.rows if layout.scoring_queries else 0
        return StepShape(
            tokens=bucket.tokens, rows=bucket.rows, picks=bucket.tokens, verify_probes=scores,
            draft_probes=scores if layout.scores_drafts else 0, updates=self.updates(bucket),
            max_query_len=layout.draft_limit + 1, max_kv_len=self._max_kv_len)

    def all_full(self, modes: Sequence[Mode]) -> list[Bucket]:
        """Every token count, largest first, with the largest row count that can have it."""
        found = []
        for mode in modes:
            for tokens in reversed(self.tokens):
                for rows in self.rows:
                    if rows <= tokens and (rows == self.rows[-1] or 2 * rows > tokens):
                        found.append(Bucket(tokens, rows, mode))
        return found


class StepGraphs:
    """Captures on first use; `capture` does so ahead. Graphs share one memory pool."""

    def __init__(self, step: Step, builder: BatchBuilder, sizes: Buckets) -> None:
        self._step = step
        self._builder = builder
        self._sizes = sizes
        self._captured: dict[Bucket, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, plan: StepPlan, mode: Mode) -> Outcome | None:
        """The outcome, valid until the next run; None when no bucket fits the plan."""
        if not self._sizes.fits(plan):
            return None
        arrays, shape = self._builder.collect(plan)
        bucket = self._sizes.smallest(shape, mode)
        if shape.updates > self._sizes.updates(bucket):
            return None
        captured = self._captured.get(bucket) or self._capture(bucket)
        staging = self._builder.staging
        host = staging.claim(len(captured.packed), torch.int32)
        captured.packing.fill(host.numpy(), arrays)
        captured.packed.copy_(host, non_blocking=True)
        staging.mark()
        captured.graph.replay()
        return captured.outcome

    def capture(self, modes: Sequence[Mode], advance: Callable[[int], None]) -> None:
        """Capture all buckets of full batches; advance(1) after each."""
        for bucket in self.buckets(modes):
            if bucket not in self._captured:
                self._capture(bucket)
            advance(1)

    def buckets(self, modes: Sequence[Mode]) -> list[Bucket]:
        """What `capture` captures."""
        return self._sizes.all_full(modes)

    @torch.inference_mode()
    def _capture(self, bucket: Bucket) -> _Captured:
        packing = self._builder.packing(self._sizes.shape(bucket))
        packed = torch.from_numpy(packing.padding).to(self._builder.device)  # touches the scratch slot alone
        batch = Batch(packing.views(packed), packing.shape)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(batch, bucket.mode)  # compiles kernels, which a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = self._step(batch, bucket.mode)
        captured = _Captured(graph, packing, packed, outcome)
        self._captured[bucket] = captured
        return captured
