"""The arithmetic of the chunk benchmark; its times need a GPU."""

from functools import partial

import pytest

from aspire.attention.chunked import ChunkedAttention
from aspire.attention.reference import ReferenceAttention
from aspire.bench import chunks, kernel_mixes


def test_a_timing_counts_the_pairs_and_splits_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 queries after 56 keys: 40 * 56 + 820 pairs of 4 * 32 * 128 operations, in 1 ms. Planted faults: rows that the
    host knows nothing of, which no library gets; the square of the chunk counted whole."""
    monkeypatch.setattr(chunks, "build", partial(kernel_mixes.build, device="cpu"))

    inputs = chunks.chunk_inputs(40, 50)  # 90 keys, rounded up to blocks
    monkeypatch.setattr(chunks, "median_ms", lambda work: (work(), float(len(inputs.key_caches)))[1])
    calls = []

    class Library:
        name = "counted"

        def supports(self, query: object) -> bool:
            return True

        def __call__(self, query, key, value, group, scale):  # type: ignore[no-untyped-def]
            calls.append((group.num_queries, group.num_keys))
            return query

    timing = chunks.time_chunk("x", ChunkedAttention(ReferenceAttention, Library(), least=1), inputs, 1e12)
    assert calls == [((40,), (96,))] * len(inputs.key_caches)
    assert (timing.queries, timing.context, timing.ms) == (40, 56, 1.0)
    assert timing.tflops * 1e9 == pytest.approx(4 * 32 * 128 * (40 * 56 + 820))
    assert timing.of_matrix == pytest.approx(timing.tflops)
