"""The Triton select_topk under the interpreter, with many ties."""

import pytest
import torch
from torch import Tensor

from aspire.ops.select_topk import reference
from aspire.ops.select_topk.lists import ListRows, Places
from aspire.ops.select_topk.reference import select_topk

pytestmark = pytest.mark.interpret

CAPACITY = 25


def both(monkeypatch: pytest.MonkeyPatch, keep: int, scores: Tensor, ranges: tuple[Tensor, Tensor, Tensor],
         coverage: float | None = None) -> None:
    """The kernel's answer equals the reference's, from scores that are garbage outside the candidates."""
    import aspire.ops.select_topk.triton as module

    first, last, k = ranges
    monkeypatch.setattr(module, "KEEP", keep)
    expected = select_topk(scores, first, last, k, capacity=CAPACITY, coverage=coverage)
    index = torch.arange(scores.shape[1])
    garbage = torch.tensor([torch.nan, torch.inf, -torch.inf, 7.0, -3.0])[index % 5]
    dirty = torch.where((index >= first[:, None]) & (index < last[:, None]), scores, garbage)
    units, num = module.select_topk(dirty, first, last, k, capacity=CAPACITY, coverage=coverage)
    assert torch.equal(num, expected[1])
    assert torch.equal(units, expected[0])


@pytest.mark.parametrize("coverage", [None, 0.9])
@pytest.mark.parametrize("num_units", [37, 700])
@pytest.mark.parametrize("keep", [32768, 16], ids=["in registers", "in chunks"])
def test_equals_the_reference(monkeypatch: pytest.MonkeyPatch, keep: int, num_units: int,
                              coverage: float | None) -> None:
    """Sums are exact in eighths; so many ties that more units are kept than a program's first block holds. Empty rows
    (padding) and k = 0 among the others. Planted faults: ties to the higher index; a chunk's start left out of its
    indices; the spare ties not carried to the next block."""
    scores = torch.randint(0, 9, (8, num_units), generator=torch.Generator().manual_seed(num_units)).float() / 8
    first = torch.tensor([0, 3, 0, 5, num_units, 0, 9, 0])
    last = torch.tensor([num_units, 30, 17, num_units + 5, num_units, 1, 4, -3])
    k = torch.tensor([10, 20, 0, 40, 3, 2, 5, 4])
    both(monkeypatch, keep, scores, (first, last, k), coverage)


@pytest.mark.parametrize("keep", [32768, 16], ids=["in registers", "in chunks"])
def test_long_rows_of_distinct_scores(monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    """Several chunks and passes over the groups; a row shorter than its number of groups; equal rows; tiny scores.
    Planted faults: units at the floor left out; a chunk's place shifted by all its size."""
    gen = torch.Generator().manual_seed(1)
    scores = torch.rand(6, 5000, generator=gen) ** 12
    scores[1] = torch.rand(5000, generator=gen) * 1e-3 + 0.5
    scores[2] = 0.25
    scores[3] *= 1e-38
    scores[4] = torch.linspace(0, 1, 5000)  # the best lie side by side
    first, last = torch.tensor([0, 2100, 3, 7, 0, 4980]), torch.tensor([5000, 4999, 400, 5000, 4990, 5000])
    both(monkeypatch, keep, scores, (first, last, torch.tensor([25, 25, 24, 25, 25, 25])))


def test_more_picks_than_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the floor left at its last trial when too few groups have a candidate."""
    import aspire.ops.select_topk.triton as module

    monkeypatch.setattr(module, "COLUMNS", 16)
    monkeypatch.setattr(module, "MOST_GROUPS", 16)
    scores = torch.rand(2, 150, generator=torch.Generator().manual_seed(2))
    both(monkeypatch, 16, scores, (torch.tensor([0, 4]), torch.tensor([150, 139]), torch.tensor([25, 20])))


def test_a_score_that_is_no_number_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a failing model leaves, a list holds distinct units inside the candidates. Planted fault: the bits of a
    NaN as key, which then is the best."""
    import aspire.ops.select_topk.triton as module

    scores = torch.rand(2, 600, generator=torch.Generator().manual_seed(3))
    scores[0, ::3] = torch.nan
    scores[1] = torch.nan
    first, last, k = torch.tensor([5, 0]), torch.tensor([590, 400]), torch.tensor([25, 25])
    for keep in (32768, 16):
        monkeypatch.setattr(module, "KEEP", keep)
        units, num = module.select_topk(scores, first, last, k, capacity=CAPACITY, coverage=None)
        clean = select_topk(scores.nan_to_num(0.0), first, last, k, capacity=CAPACITY, coverage=None)
        assert torch.equal(units, clean[0])
        assert num.tolist() == [25, 25]


@pytest.mark.parametrize("draft", [(2, 3), (0, 0), (1, 1)], ids=["three lists", "none", "one"])
@pytest.mark.parametrize("keep", [32768, 16], ids=["in registers", "in chunks"])
def test_results_in_stored_lists(monkeypatch: pytest.MonkeyPatch, keep: int, draft: tuple[int, int]) -> None:
    """Verifying rows set list 1, drafting ones several, one or none; every other entry of the store stays. A row that
    finds nothing still empties its lists. Planted faults: the second list written at the next slot; rows without
    lists written to list 0; an empty row's lists left as they were."""
    import aspire.ops.select_topk.triton as module

    monkeypatch.setattr(module, "KEEP", keep)
    scores = torch.rand(5, 700, generator=torch.Generator().manual_seed(2))
    first, last = torch.zeros(5, dtype=torch.int32), torch.tensor([700, 600, 0, 90, 700])
    k, slot = torch.tensor([9, 25, 25, 4, 17]), torch.tensor([3, 0, 5, 4, 2])
    stores = []
    for select_into in (reference.select_into, module.select_into):
        lists = ListRows(torch.full((6, 7, CAPACITY), 77, dtype=torch.int32), torch.full((6, 7), 66, dtype=torch.int32),
                         slot, 2, (1, 1), draft)
        select_into(scores, first, last, k, coverage=None, lists=lists)
        stores.append(lists)
    assert torch.equal(stores[0].units, stores[1].units)
    assert torch.equal(stores[0].num_units, stores[1].num_units)
    assert int((stores[1].num_units != 66).sum()) == 2 + 3 * draft[1]
    assert stores[1].num_units[1, 3] == 9


@pytest.mark.parametrize("draft", [(0, 0), (1, 1)], ids=["verifying rows", "all rows"])
@pytest.mark.parametrize("keep", [32768, 16], ids=["in registers", "in chunks"])
def test_blocks_of_rows_and_where_units_lie(monkeypatch: pytest.MonkeyPatch, keep: int, draft: tuple[int, int]) -> None:
    """Three blocks of scores set lists 1 to 3 of the same slots, with the same ranges; a place is found through the
    slot's own line of the block table. Planted faults: the second block with ranges of rows past the first; the table's
    line of the row instead of the slot; a unit's place inside its block left out."""
    import aspire.ops.select_topk.triton as module

    monkeypatch.setattr(module, "KEEP", keep)
    gen = torch.Generator().manual_seed(4)
    scores = torch.rand(3 * 5, 700, generator=gen)
    first, last = torch.tensor([0, 8, 0, 3, 50], dtype=torch.int32), torch.tensor([700, 600, 0, 90, 699])
    k, slot = torch.tensor([9, 25, 25, 4, 17]), torch.tensor([3, 0, 5, 4, 2])
    table = torch.randperm(7 * 200, generator=gen).view(7, 200).int()[:, :180]  # 4 units a block
    stores = []
    for select_into in (reference.select_into, module.select_into):
        places = Places(torch.full((6, 7, CAPACITY), 55, dtype=torch.int32), table, 4)
        lists = ListRows(torch.full((6, 7, CAPACITY), 77, dtype=torch.int32), torch.full((6, 7), 66, dtype=torch.int32),
                         slot, 2, (1, 1), draft, places)
        select_into(scores, first, last, k, coverage=None, lists=lists)
        stores.append(lists)
    assert torch.equal(stores[0].units, stores[1].units)
    assert torch.equal(stores[0].num_units, stores[1].num_units)
    assert int((stores[1].num_units != 66).sum()) == 3 * (2 + 3 * draft[1])
    listed = (stores[1].units >= 0) & (stores[1].units != 77)
    found = stores[1].places
    assert found is not None
    lists_, slots, entries = listed.nonzero(as_tuple=True)
    units = stores[1].units[lists_, slots, entries].long()
    assert torch.equal(found.stored[lists_, slots, entries].long(), table[slots, units // 4].long() * 4 + units % 4)
