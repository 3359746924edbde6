"""The torch reference of select_topk against sorting in Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aspire.ops.select_topk.reference import select_topk

ROWS = st.lists(st.tuples(st.lists(st.integers(0, 6), min_size=9, max_size=9), st.integers(0, 9), st.integers(0, 12),
                          st.integers(0, 11)), min_size=1, max_size=5)


def plain(scores: list[int], first: int, last: int, k: int, coverage: float | None) -> list[int]:
    order = sorted(range(first, min(last, len(scores))), key=lambda u: (-scores[u], u))
    total, chosen, mass = sum(scores[u] for u in order), [], 0.0
    for unit in order[:k]:
        chosen.append(unit)
        mass += scores[unit]
        if coverage is not None and mass >= coverage * total:
            break
    return sorted(chosen)


@pytest.mark.parametrize("coverage", [None, 0.5, 1.0])
@given(rows=ROWS, capacity=st.integers(1, 12))
def test_best_units_in_order(rows: list[tuple[list[int], int, int, int]], capacity: int,
                             coverage: float | None) -> None:
    """Planted faults: ties to the higher index; padding counted as candidates; coverage one unit short."""
    scores = torch.tensor([row[0] for row in rows], dtype=torch.float32)
    first, last, k = (torch.tensor([row[i] for row in rows], dtype=torch.int32) for i in (1, 2, 3))
    units, num = select_topk(scores, first, last, k, capacity=capacity, coverage=coverage)
    assert units.dtype == num.dtype == torch.int32
    assert units.shape == (len(rows), capacity)
    for n, row in enumerate(rows):
        expected = plain(row[0], row[1], row[2], min(row[3], capacity), coverage)
        assert units[n].tolist() == expected + [-1] * (capacity - len(expected))
        assert int(num[n]) == len(expected)


def test_values_outside_the_candidates_do_not_count() -> None:
    """Planted fault: NaN outside [first, last) reaches the order."""
    scores = torch.tensor([[torch.nan, 1.0, 3.0, 2.0, torch.inf]])
    one, four, two = (torch.tensor([x]) for x in (1, 4, 2))
    assert select_topk(scores, one, four, two, capacity=2, coverage=None)[0].tolist() == [[2, 3]]
    assert select_topk(scores, one, four, two, capacity=2, coverage=0.5)[0].tolist() == [[2, -1]]
