"""The compiled select_topk against the reference at the sizes of real contexts."""

import pytest
import torch
from torch import Tensor

from aspire.ops.select_topk.lists import ListRows, Places
from aspire.ops.select_topk.reference import select_into, select_topk

pytestmark = pytest.mark.gpu


def scores_of(kind: str, rows: int, units: int) -> Tensor:
    """Rows that differ, poisoned outside [4, 0.9 of the units)."""
    gen = torch.Generator("cuda").manual_seed(units)
    x = torch.randn(rows, units, device="cuda", generator=gen)
    scores = {"heavy tail": x.mul(3).exp(), "narrow": x.mul(1e-4).exp(), "ties": x.abs().mul(8).floor() / 8,
              "rising": x.abs().cumsum(1), "equal": x.mul(0) + 0.5}[kind]
    scores[:, :4] = torch.inf
    scores[:, units * 9 // 10:] = torch.nan
    return scores


@pytest.mark.parametrize("kind", ["heavy tail", "narrow", "ties", "rising", "equal"])
@pytest.mark.parametrize("units", [8035, 33056, 131100])
@pytest.mark.parametrize("rows", [16, 128])
def test_equals_the_reference(rows: int, units: int, kind: str) -> None:
    """Every fourth row is padding. Planted fault: units at the peaks' floor left out."""
    from aspire.ops.select_topk.triton import select_topk as kernel

    scores = scores_of(kind, rows, units)
    n = torch.arange(rows, device="cuda", dtype=torch.int32)
    first, last = torch.full_like(n, 4), units * 9 // 10 - 61 * n
    k = torch.where(n % 4 == 3, 0, 444 - n)
    last = torch.where(n % 8 == 7, 0, last)
    expected = select_topk(scores, first, last, k, capacity=444, coverage=None)
    for _ in range(2):
        found = kernel(scores, first, last, k, capacity=444, coverage=None)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_in_a_graph() -> None:
    """A replay follows scores and ranges. Planted fault: a workspace zeroed outside the graph."""
    from aspire.ops.select_topk.triton import select_topk as kernel

    scores, first = scores_of("heavy tail", 16, 33056), torch.full((16,), 4, device="cuda", dtype=torch.int32)
    last, k = torch.full_like(first, 29000), torch.full_like(first, 444)
    kernel(scores, first, last, k, capacity=444, coverage=None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(scores, first, last, k, capacity=444, coverage=None)
    for seed in range(3):
        scores.copy_(scores.roll(1 + 777 * seed, dims=1).nan_to_num(0.1, 2.0))
        last.fill_(33000 - 9000 * seed)
        graph.replay()
        expected = select_topk(scores, first, last, k, capacity=444, coverage=None)
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("units", [8035, 33056])
def test_results_in_stored_lists(units: int) -> None:
    """Rows of both kinds write their slots' lists. Planted fault: the slot's place in int32 of a row's own index."""
    from aspire.ops.select_topk.triton import select_into as kernel

    scores, first = scores_of("heavy tail", 32, units), torch.full((32,), 4, device="cuda", dtype=torch.int32)
    last, k = torch.full_like(first, units * 8 // 10), torch.full_like(first, 444)
    slot = torch.randperm(40, device="cuda")[:32]
    stores = []
    for function in (select_into, kernel):
        lists = ListRows(torch.full((10, 41, 444), 7, dtype=torch.int32, device="cuda"),
                         torch.zeros(10, 41, dtype=torch.int32, device="cuda"), slot, 20, (3, 1), (4, 5))
        function(scores, first, last, k, coverage=None, lists=lists)
        stores.append(lists)
    assert torch.equal(stores[0].units, stores[1].units)
    assert torch.equal(stores[0].num_units, stores[1].num_units)


@pytest.mark.parametrize("units", [8035, 33056])
def test_blocks_of_rows_and_where_units_lie(units: int) -> None:
    """Four blocks of scores set lists 3 to 6. Planted fault: a place looked up in the row's line of the block table."""
    from aspire.ops.select_topk.triton import select_into as kernel

    scores, first = scores_of("heavy tail", 4 * 16, units), torch.full((16,), 4, device="cuda", dtype=torch.int32)
    last, k = torch.full_like(first, units * 8 // 10), torch.full_like(first, 444)
    slot = torch.randperm(40, device="cuda")[:16]
    table = torch.randint(0, 1 << 20, (41, -(-units // 16)), device="cuda", dtype=torch.int32)
    stores = []
    for function in (select_into, kernel):
        places = Places(torch.zeros(10, 41, 444, dtype=torch.int32, device="cuda"), table, 16)
        lists = ListRows(torch.full((10, 41, 444), 7, dtype=torch.int32, device="cuda"),
                         torch.zeros(10, 41, dtype=torch.int32, device="cuda"), slot, 16, (3, 1), (0, 0), places)
        function(scores, first, last, k, coverage=None, lists=lists)
        stores.append(lists)
    assert torch.equal(stores[0].units, stores[1].units)
    assert stores[0].places is not None
    assert stores[1].places is not None
    assert torch.equal(stores[0].places.stored, stores[1].places.stored)
