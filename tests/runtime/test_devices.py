"""Which implementations an engine gets."""

import sys
from types import SimpleNamespace

import pytest
import torch

from aspire.config import EngineConfig
from aspire.runtime.devices import choose_attention, device_kit


@pytest.mark.parametrize(("name", "invariant", "chosen", "captures"), [
    ("auto", False, "triton+flash", True), ("auto", True, "triton", True), ("triton", False, "triton", True),
    ("triton+cudnn", False, "triton+cudnn", True), ("reference", False, "reference", False)])
def test_backend_by_name(name: str, invariant: bool, chosen: str, captures: bool) -> None:
    """Planted fault: auto keeps the library under batch_invariant, where a prompt's cuts would show in its bits."""
    pytest.importorskip("triton")
    backend = choose_attention(name, batch_invariant=invariant)
    assert (backend.name, backend.captures) == (chosen, captures)


def test_what_does_not_go_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the library allowed with batch_invariant."""
    with pytest.raises(ValueError, match=r"with batch_invariant must be auto or triton, got 'triton\+flash'"):
        choose_attention("triton+flash", batch_invariant=True)
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match="attention_backend flashinfer needs a package"):
        choose_attention("flashinfer", batch_invariant=False)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    assert choose_attention("flashinfer", batch_invariant=False).captures is False
    with pytest.raises(ValueError, match="on the CPU must be auto or reference, got 'triton'"):
        device_kit(torch.device("cpu"), batch_invariant=False, attention_backend="triton")
    with pytest.raises(ValueError, match=r"attention_backend must be one of auto, triton, .*, got 'fa3'"):
        EngineConfig.from_options("m", {"attention_backend": "fa3"})
