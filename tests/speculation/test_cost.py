"""CostModel, its fit, and KV bytes."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.schedule.plan import Row, RowKind, StepPlan
from aspire.speculation.cost import CostModel, KvShape, Sample, fit, kv_shape, load, nominal
from aspire.speculation.layers import per_layer_lists
from aspire.speculation.selection import SelectionConfig


def shape() -> KvShape:
    return kv_shape(per_layer_lists(10, (2, 6), dense=(4, 5)), SelectionConfig(budget=512), 100,
                    windows=(None,) * 4 + (128, 128) + (None,) * 4)


TRUE = (1.0e-3, 3.6e-3, 2.2e-5, 2.5e-13)


def samples(rng: random.Random, count: int, noise: float) -> list[Sample]:
    """Steps of TRUE with tokens on both sides of its knee of 164."""
    model = CostModel(*TRUE, shape())
    result = []
    for _ in range(count):
        tokens, kv_bytes = rng.choice([rng.randint(1, 160), rng.randint(165, 1200)]), rng.uniform(0, 6e10)
        result.append(Sample(tokens, kv_bytes, model.step_seconds(tokens, kv_bytes) * rng.gauss(1.0, noise)))
    return result


def test_bytes_of_rows() -> None:
    """2 refresh layers read all, 6 listed ones at most the budget, 2 sliding ones their window of 128."""
    kv = shape()
    assert kv.full_bytes(3000) == 100 * (8 * 3000 + 2 * 128)
    assert kv.full_bytes(50) == 100 * 10 * 50
    assert kv.sparse_bytes(3000, 5) == 100 * (2 * 3005 + 6 * (512 + 5) + 2 * 128)
    assert kv.sparse_bytes(400, 5) == kv.full_bytes(405)


def test_bytes_of_drafts_that_renew_seldom() -> None:
    """Drafts 3, 6, ... read all in the 2 refresh layers, the others the budget there too.

    Planted fault: refresh layers priced as whole at every draft.
    """
    kv = kv_shape(per_layer_lists(10, (2, 6), dense=(4, 5), refresh_every=3), SelectionConfig(budget=512), 100,
                  windows=(None,) * 4 + (128, 128) + (None,) * 4)
    assert kv.full_bytes(3000) == shape().full_bytes(3000)
    for num_drafted in range(9):
        whole = shape().sparse_bytes(3000, num_drafted)
        saved = 0 if num_drafted in (2, 5, 8) else 100 * 2 * (3000 - 512)
        assert kv.sparse_bytes(3000, num_drafted) == whole - saved
    assert kv.mean_sparse_bytes(3000) == sum(kv.sparse_bytes(3000, j) for j in (0, 1, 2)) / 3
    assert shape().mean_sparse_bytes(3000) == shape().sparse_bytes(3000, 2)


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_bytes_of_a_plan_are_those_of_its_rows(refresh_every: int) -> None:
    """Planted faults: sliding layers left out; lists of refresh layers read in renewing drafts too."""
    rows = (Row("a", 0, RowKind.SPARSE, 3004, 1, 5, True), Row("b", 1, RowKind.FULL, 999, 4, 3, True),
            Row("c", 2, RowKind.FULL, 256, 128, 0, False, tokens=(1,) * 128),
            Row("d", 3, RowKind.SPARSE, 70, 1, 3, True), Row("e", 3, RowKind.SPARSE, 900, 1, 0, True))
    kv = kv_shape(per_layer_lists(10, (2, 6), dense=(4, 5), refresh_every=refresh_every), SelectionConfig(budget=512),
                  100, windows=(None,) * 4 + (128, 128) + (None,) * 4)
    assert kv.plan_bytes(StepPlan(0, rows)) == sum([
        kv.sparse_bytes(3000, 5), kv.full_bytes(1003), kv.full_bytes(384), kv.sparse_bytes(68, 3),
        kv.sparse_bytes(901, 0)])


@pytest.mark.parametrize("seed", range(4))
def test_fit_recovers_the_parameters(seed: int) -> None:
    """Planted faults: no knee search (per_token 20 % low); absolute instead of relative errors (base lost)."""
    model = fit(samples(random.Random(seed), 400, 0.01), shape())
    assert model.base + model.weights == pytest.approx(TRUE[0] + TRUE[1], rel=0.03)
    assert model.per_token == pytest.approx(TRUE[2], rel=0.05)
    assert model.per_byte == pytest.approx(TRUE[3], rel=0.03)
    assert model.knee == pytest.approx(TRUE[1] / TRUE[2], rel=0.25)
    assert model.fitted


def test_fit_shrugs_off_outliers() -> None:
    """One step in 20 takes 10 times as long (a pause of the host), one a fifth (its end was noticed early).

    Planted fault: no reweighting.
    """
    rng = random.Random(9)
    steps = [Sample(s.tokens, s.kv_bytes, s.seconds * {0: 10.0, 7: 0.2}.get(i % 20, 1.0))
             for i, s in enumerate(samples(rng, 400, 0.01))]
    model = fit(steps, shape())
    assert model.step_seconds(64, 3e10) == pytest.approx(CostModel(*TRUE, shape()).step_seconds(64, 3e10), rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1e10), st.floats(1e-5, 1.0)), min_size=4, max_size=30))
def test_coefficients_are_never_negative(steps: list[tuple[int, float, float]]) -> None:
    model = fit([Sample(*step) for step in steps], shape())
    assert min(model.base, model.weights, model.per_token, model.per_byte) >= 0.0


def test_saved_models_load(tmp_path: Path) -> None:
    model = CostModel(*TRUE, shape())
    model.save(tmp_path / "cost.json")
    assert load(tmp_path / "cost.json", shape()) == model


def test_bad_files_and_values_are_named(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text('{"base": 1}')
    with pytest.raises(ValueError, match=r"cost\.json"):
        load(tmp_path / "cost.json", shape())
    with pytest.raises(ValueError, match="samples"):
        fit([], shape())
    with pytest.raises(ValueError, match=r"cost\.per_byte.*-1"):
        CostModel(0.0, 0.0, 0.0, -1.0, shape())
    with pytest.raises(ValueError, match="windows"):
        kv_shape(per_layer_lists(3), SelectionConfig(), 10, windows=(None,))
    with pytest.raises(ValueError, match="bytes_per_token"):
        kv_shape(per_layer_lists(3), SelectionConfig(), 0)


def test_nominal_prices_are_relative() -> None:
    model = nominal(shape())
    assert not model.fitted
    assert model.step_seconds(1, shape().full_bytes(3000)) > 2 * model.step_seconds(1, shape().sparse_bytes(3000, 0))
