"""What layers agree on, on lists written by hand."""

import pytest
import torch

from aspire.calibrate.agreement import Agreement, masks, shared


def test_shares_of_lists_by_hand() -> None:
    """Two layers, two slots, lists of different lengths; what stands behind a list's end does not count.
    Planted faults: all of a list's memory taken for chosen; shares of the reader's list instead of the wanted one's."""
    units = torch.tensor([[[0, 2, 9], [1, 3, 5]], [[2, 4, 6], [1, 7, 0]]], dtype=torch.int32)
    num_units = torch.tensor([[2, 3], [3, 2]], dtype=torch.int32)
    chosen = masks(units, num_units)
    assert chosen.sum(2).tolist() == [[2.0, 3.0], [3.0, 2.0]]
    found = shared(chosen, chosen)
    assert found.diagonal().tolist() == [1.0, 1.0]
    assert found[0, 1].item() == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert found[1, 0].item() == pytest.approx((1 / 2 + 1 / 3) / 2)
    uneven = masks(units[:1], torch.tensor([[1, 3]]))
    assert shared(uneven, chosen[:1])[0, 0].item() == pytest.approx((1 / 2 + 1) / 2)
    assert shared(chosen[:1], uneven)[0, 0].item() == 1.0


def test_forecast_of_refresh_layers() -> None:
    """Layers 1, 2 and 4 keep lists. Planted faults: the first refresh layer below instead of the nearest; layers below
    all refresh layers taken for served."""
    both = ((1.0, 0.5, 0.25), (0.5, 1.0, 0.75), (0.25, 0.75, 1.0))
    agreement = Agreement((1, 2, 4), both, (0.6, 0.8, 0.4))
    assert agreement.forecast(()) == pytest.approx((0.8 + 0.9 + 0.7) / 3)
    assert agreement.forecast((1,)) == pytest.approx((1.0 + 0.5 + 0.25) / 3)
    assert agreement.forecast((2,)) == pytest.approx((0.8 + 1.0 + 0.75) / 3)
    assert agreement.forecast((1, 2)) == pytest.approx((1.0 + 1.0 + 0.75) / 3)
