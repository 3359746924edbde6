"""From plans to batches: what the host says of rows agrees with what the device gets."""

import torch

from aspire.runtime.batch import BatchBuilder, BatchLayout
from aspire.schedule.plan import Row, RowKind, StepPlan

FULL, SPARSE = RowKind.FULL, RowKind.SPARSE


def test_host_rows_cover_the_probes() -> None:
    """Verifications and drafts. Probed queries are among the last `num_probed` of their row; the host knows the place
    of prompt chunks only.

    Planted faults: no probed queries said of full rows that sample, or of drafts; a decoding row's lower bound given
    as its place.
    """
    rows = (Row("a", 3, FULL, 90, 5, 4, samples=True), Row("b", 0, SPARSE, 70, 1, 2, samples=True),
            Row("c", 1, FULL, 0, 30, 0, samples=False, tokens=tuple(range(30))),
            Row("d", 2, FULL, 30, 40, 0, samples=True, tokens=tuple(range(40))))
    layout = BatchLayout(draft_limit=8, scoring_queries=4, blocks_per_slot=10, scratch_slot=4, scores_drafts=True)
    batch = BatchBuilder(layout, device=torch.device("cpu")).build(StepPlan(0, rows))
    assert [(row.slot, row.num_queries, row.kv_len) for row in batch.rows] == [
        (3, 5, None), (0, 1, None), (1, 30, 30), (2, 40, 70)]
    assert [row.num_probed for row in batch.rows] == [5, 1, 0, 9]
    assert batch.inputs.draft_row.tolist() == [1]
    end = batch.inputs.query_start[1:].tolist()
    for tokens, row in zip(batch.inputs.verify_token.tolist(), batch.inputs.verify_row.tolist(), strict=True):
        assert all(end[row] - batch.rows[row].num_probed <= token < end[row] for token in tokens)
