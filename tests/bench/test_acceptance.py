"""The sums behind `aspire bench acceptance`, against a run done by hand."""

import pytest

from aspire.bench.acceptance import kv_bytes, make_contexts
from aspire.samples import gsm8k_sample
from aspire.speculation.cost import KvShape
from aspire.speculation.selection import SelectionConfig
from aspire.stats import RowStats, StepStats


def step(number: int, *rows: RowStats) -> StepStats:
    return StepStats(number, float(number), 1.0, rows, sum(row.num_tokens for row in rows), 0.0, 1, 0)


def test_kv_bytes_follow_the_growing_context() -> None:
    """One request, 100 prompt tokens, 2 listed layers and 1 full one, 10 bytes a token and layer. Planted fault: the
    context stays at the prompt's length."""
    shape = KvShape(10, 1, 2, (), SelectionConfig(unit=1, sinks=4, window=4, budget=32))
    steps = [step(0, RowStats("a", "prefill", 100, 0, 0, 1)), step(1, RowStats("a", "draft", 1, 0)),
             step(2, RowStats("a", "draft", 1, 1)), step(3, RowStats("a", "verify", 3, 2, 1, 2)),
             step(4, RowStats("a", "verify", 1, 0, 0, 1))]
    drafts = shape.sparse_bytes(101, 0) + shape.sparse_bytes(101, 1)
    assert kv_bytes(steps, {"a": 100}, shape) == drafts + 10 * 3 * (101 + 2) + 10 * 3 * 103


class WordTokenizer:
    """One token per word."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def test_contexts_have_the_asked_length_and_differ() -> None:
    """Planted fault: one order of problems for all prompts."""
    contexts = make_contexts(gsm8k_sample(), WordTokenizer(), count=3, length=500, seed=1)
    assert [len(one) for one in contexts] == [500] * 3
    assert contexts[0] != contexts[1] != contexts[2]
    assert contexts == make_contexts(gsm8k_sample(), WordTokenizer(), count=3, length=500, seed=1)


def test_a_context_longer_than_the_data_is_refused() -> None:
    """Planted fault: a shorter prompt, without a word."""
    with pytest.raises(ValueError, match="context must be at most"):
        make_contexts(gsm8k_sample(), WordTokenizer(), count=1, length=100_000, seed=1)
