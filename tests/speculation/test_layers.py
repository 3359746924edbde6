"""LayerPlan builders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.speculation.layers import (
    Between,
    LayerPlan,
    dense_plan,
    per_layer_lists,
    renews,
    selecting_layers,
    shared_list,
    static_list,
)


@st.composite
def models(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """A depth, refresh layers and dense layers, disjoint."""
    num_layers = draw(st.integers(2, 40))
    kinds = draw(st.lists(st.sampled_from("lrd"), min_size=num_layers, max_size=num_layers))
    return (num_layers, tuple(i for i, kind in enumerate(kinds) if kind == "r"),
            tuple(i for i, kind in enumerate(kinds) if kind == "d"))


@given(models())
def test_every_listed_layer_has_one_writer_below(model: tuple[int, tuple[int, ...], tuple[int, ...]]) -> None:
    """A list is set by its own layer at verification, or renewed by the nearest refresh layer below, never both.

    Planted fault: a refresh layer that kept the one before it as writer (`below` not moved).
    """
    num_layers, refresh, dense = model
    plan = per_layer_lists(num_layers, refresh, dense)
    assert set(plan.full_layers) == {*refresh, *dense}
    for layer, index in enumerate(plan.reads):
        if index is None:
            assert plan.verify_writes[layer] == ()
            continue
        nearest = [r for r in refresh if r < layer][-1:]
        assert [r for r, lists in enumerate(plan.draft_writes) if index in lists] == nearest
        assert plan.verify_writes[layer] == (() if nearest else (index,))
    assert sorted({i for i in plan.reads if i is not None}) == list(range(plan.num_lists))
    assert plan.apply == "same_step"
    assert plan.tail == "verify"


def test_refresh_layers_of_a_known_plan() -> None:
    plan = per_layer_lists(8, (2, 5), dense=(3,))
    assert plan.reads == (0, 1, None, None, 2, None, 3, 3)
    assert plan.verify_writes == ((0,), (1,), (), (), (), (), (), ())
    assert plan.draft_writes == ((), (), (2,), (), (), (3,), (), ())


@given(models(), st.integers(2, 5), st.sampled_from(["group", "layer"]))
def test_lists_that_are_seldom_renewed_are_all_chosen_at_verification(
        model: tuple[int, tuple[int, ...], tuple[int, ...]], every: int, between: Between) -> None:
    """Every list has one layer that verifies it, and the nearest refresh layer at or below renews it; between renewals
    a refresh layer reads the list that its own scores chose.

    Planted fault: a refresh layer's list numbered but not chosen at verification.
    """
    num_layers, refresh, dense = model
    plan = per_layer_lists(num_layers, refresh, dense, refresh_every=every, between=between)
    often = per_layer_lists(num_layers, refresh, dense)
    assert [index is None for index in plan.reads] == [index is None for index in often.reads]
    assert sorted(index for lists in plan.verify_writes for index in lists) == list(range(plan.num_lists))
    for layer in range(num_layers):
        index = plan.reads_between(layer)
        if layer in dense:
            assert index is None
            assert plan.verify_writes[layer] == ()
            continue
        nearest = [r for r in refresh if r <= layer][-1:]
        assert [r for r, lists in enumerate(plan.draft_writes) if index in lists] == nearest
        chooser = layer if between == "layer" or not nearest else nearest[0]
        assert plan.verify_writes[chooser] == (index,)
        assert often.reads_between(layer) == often.reads[layer]


def test_a_known_plan_that_is_seldom_renewed() -> None:
    plan = per_layer_lists(8, (2, 5), dense=(3,), refresh_every=3)
    assert plan.reads == (0, 1, None, None, 2, None, 3, 3)
    assert [plan.reads_between(layer) for layer in range(8)] == [0, 1, 2, None, 2, 3, 3, 3]
    assert plan.verify_writes == ((0,), (1,), (2,), (), (), (3,), (), ())
    assert plan.draft_writes == ((), (), (2,), (), (), (3,), (), ())
    own = per_layer_lists(8, (2, 5), dense=(3,), refresh_every=3, between="layer")
    assert [own.reads_between(layer) for layer in range(8)] == [0, 1, 2, None, 3, 4, 5, 6]
    assert own.draft_writes == ((), (), (2, 3), (), (), (4, 5, 6), (), ())
    assert shared_list(6, 4, refresh_every=2).reads_between(4) == 0


def test_drafts_that_renew() -> None:
    """Planted fault: counted from the draft after the verification's bonus token, one early."""
    assert [n for n in range(9) if renews(n, 3)] == [2, 5, 8]
    assert all(renews(n, 1) for n in range(9))


def test_shared_list_is_written_by_one_layer_for_the_next_step() -> None:
    plan = shared_list(6, 4, dense=(1,))
    assert plan.reads == (0, None, 0, 0, None, 0)
    assert plan.verify_writes == plan.draft_writes == ((), (), (), (), (0,), ())
    assert plan.apply == "next_step"
    assert plan.needs_scores


def test_selecting_layers_serve_those_above_and_move_the_tail() -> None:
    plan = selecting_layers(8, (2, 5), dense=(0, 1))
    assert plan.reads == (None, None, None, 0, 0, None, 1, 1)
    assert plan.draft_writes[2] == (0,)
    assert plan.draft_writes[5] == (1,)
    assert plan.tail == "draft"


def test_plans_without_scores() -> None:
    assert dense_plan(3) == LayerPlan((None, None, None), ((), (), ()), ((), (), ()), 0)
    plan = static_list(3, dense=(1,))
    assert plan.reads == (0, None, 0)
    assert not plan.needs_scores


@pytest.mark.parametrize(("refresh", "dense", "names"), [
    ((4,), (), "refresh"), ((-1,), (), "refresh"), ((2, 1), (), "refresh"), ((1, 1), (), "refresh"),
    ((), (4,), "dense"), ((1,), (1,), "refresh")])
def test_impossible_layers_are_refused(refresh: tuple[int, ...], dense: tuple[int, ...], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        per_layer_lists(4, refresh, dense)
