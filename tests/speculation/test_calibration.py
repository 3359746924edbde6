"""Calibration files: written, found, refused; and what they change."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aspire.speculation.calibration import Calibration, CalibrationKey, find_calibration, load_calibration
from aspire.speculation.cost import kv_shape
from aspire.speculation.layers import dense_plan
from aspire.speculation.policy import Overrides
from aspire.speculation.selection import SelectionConfig

KEY = CalibrationKey("org/Some-Model-3.1-8B", "NVIDIA H200", "bfloat16", (32, 8, 128))
CALIBRATION = Calibration(KEY, 16, 8192, (6, 20), 256, 1e-3, 2e-3, 3e-6, 4e-13, 7, 900.0, 400.0, ({"alpha": 0.97},))


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    """Planted fault: refresh read back as a list, which no Candidate or Overrides equals."""
    CALIBRATION.save(tmp_path / "one.json")
    assert load_calibration(tmp_path / "one.json") == CALIBRATION
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
    cost = CALIBRATION.cost(kv_shape(dense_plan(32), SelectionConfig(), 4096))
    assert (cost.base, cost.weights, cost.per_token, cost.per_byte, cost.fitted) == (1e-3, 2e-3, 3e-6, 4e-13, True)


def test_a_folder_gives_the_file_of_the_key_or_none(tmp_path: Path) -> None:
    """Planted faults: the dtype, or the cache's, left out of the name; a model of another shape under the same name."""
    assert KEY.file_name == "Some-Model-3.1-8B--9d209c--NVIDIA-H200--bfloat16--tp1.json"
    assert replace(KEY, model="other/Some-Model-3.1-8B").file_name != KEY.file_name
    assert replace(KEY, kv_dtype="float8_e4m3fn").file_name != KEY.file_name
    CALIBRATION.save(tmp_path / KEY.file_name)
    assert find_calibration(str(tmp_path), replace(KEY, shape=(30, 3, 64))) is None
    assert find_calibration(str(tmp_path), KEY) == CALIBRATION
    assert find_calibration(str(tmp_path), replace(KEY, dtype="float32")) is None
    assert find_calibration(str(tmp_path), replace(KEY, kv_dtype="float8_e4m3fn")) is None
    assert find_calibration(None, KEY) is None


@pytest.mark.parametrize(("changed", "named"), [
    ({"device": "cpu x86_64 2 cores"}, "device"), ({"dtype": "float32"}, "dtype"), ({"shape": (30, 3, 64)}, "shape"),
    ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype")])
def test_a_file_of_another_machine_or_model_is_refused(changed: dict[str, object], named: str, tmp_path: Path) -> None:
    """Planted fault: the key not compared when a file is named."""
    CALIBRATION.save(tmp_path / "one.json")
    with pytest.raises(ValueError, match=f"calibration must be for {named}"):
        find_calibration(str(tmp_path / "one.json"), replace(KEY, **changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 3}', "null"])
def test_what_is_no_calibration_is_refused(text: str, tmp_path: Path) -> None:
    """Planted fault: AttributeError for a list."""
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(ValueError, match="calibration must be a file written by aspire calibrate"):
        load_calibration(tmp_path / "one.json")


def test_a_negative_price_is_refused(tmp_path: Path) -> None:
    CALIBRATION.save(tmp_path / "one.json")
    stored = json.loads((tmp_path / "one.json").read_text())
    (tmp_path / "one.json").write_text(json.dumps({**stored, "per_byte": -1.0}))
    with pytest.raises(ValueError, match="per_byte"):
        load_calibration(tmp_path / "one.json")


def test_what_the_user_gave_wins() -> None:
    """Planted faults: the calibrated budget over a given share; other presets' lists changed."""
    assert CALIBRATION.overrides("aspire", Overrides()) == Overrides(refresh=(6, 20), budget=256)
    assert CALIBRATION.overrides("aspire", Overrides(refresh=(), unit=16)) == Overrides(refresh=(), budget=256, unit=16)
    assert CALIBRATION.overrides("synchronized-aspire", Overrides(share=0.1)) == Overrides(refresh=(6, 20), share=0.1)
    assert CALIBRATION.overrides("pillar", Overrides(drafts=3)) == Overrides(drafts=3)
