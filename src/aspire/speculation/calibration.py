"""Calibration: what `aspire calibrate` chose for one model on one machine, as a value and as a JSON file."""

import json
import re
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from aspire.speculation.cost import CostModel, KvShape
from aspire.speculation.policy import Overrides

CALIBRATED_POLICIES = ("aspire", "synchronized-aspire")  # whose refresh layers and budget a calibration chooses


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """What a calibration is true for. device: the card's or the processor's name. shape: layers, KV heads, head
    dimension. kv_dtype: None: the model's."""

    model: str
    device: str
    dtype: str
    shape: tuple[int, int, int]
    tensor_parallel_size: int = 1
    kv_dtype: str | None = None

    @property
    def file_name(self) -> str:
        """One file per key; a digest tells models of one name in different folders apart."""
        digest = blake2b(self.model.encode(), digest_size=3).hexdigest()
        kv = () if self.kv_dtype is None else (f"kv-{self.kv_dtype}",)
        parts = (Path(self.model).name, digest, self.device, self.dtype, f"tp{self.tensor_parallel_size}", *kv)
        return "--".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts) + ".json"


@dataclass(frozen=True, slots=True)
class Calibration:
    """refresh: layer indices. base, weights, per_token, per_byte: coefficients of the CostModel. measured: what led
    to the choice, one object per candidate; agreement: how far layers choose the same units; for people and plots
    only."""

    key: CalibrationKey
    batch: int
    context: int
    refresh: tuple[int, ...]
    budget: int
    base: float
    weights: float
    per_token: float
    per_byte: float
    draft_length: int
    tokens_per_second: float
    plain_tokens_per_second: float
    measured: tuple[dict[str, Any], ...] = field(default=())
    agreement: dict[str, Any] | None = None

    def overrides(self, policy: str, given: Overrides) -> Overrides:
        """The choice as overrides of a preset; what the user gave wins. Other presets keep their own selection."""
        if policy not in CALIBRATED_POLICIES:
            return given
        sized = given.budget is not None or given.share is not None
        return replace(given, refresh=self.refresh if given.refresh is None else given.refresh,
                       budget=given.budget if sized else self.budget)

    def cost(self, kv: KvShape) -> CostModel:
        return CostModel(self.base, self.weights, self.per_token, self.per_byte, kv)

    def save(self, path: Path) -> None:
        """Written beside its place and moved there, so that no reader sees half of it."""
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        beside.replace(path)


def load_calibration(path: Path) -> Calibration:
    """Raises ValueError naming the file when it is no calibration."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        key = stored.pop("key")
        key["shape"] = tuple(int(size) for size in key["shape"])
        stored["refresh"] = tuple(int(layer) for layer in stored["refresh"])
        stored["measured"] = tuple(stored.get("measured", ()))
        known = {one.name for one in fields(Calibration)}
        found = Calibration(CalibrationKey(**key), **{name: value for name, value in stored.items() if name in known})
        for name in ("base", "weights", "per_token", "per_byte"):
            if not 0.0 <= float(getattr(found, name)) < float("inf"):
                raise ValueError(f"{name} is {getattr(found, name)!r}")
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"calibration must be a file written by aspire calibrate, got {str(path)!r} "
                         f"({error})") from None
    return found


def find_calibration(place: str | None, key: CalibrationKey) -> Calibration | None:
    """The calibration at `place`: a file, which must fit the key up to the model's name, or a folder, where there may
    be none for it.

    Raises ValueError for a missing or unreadable file, and for one of another machine or model.
    """
    if place is None:
        return None
    path = Path(place)
    if path.is_dir():
        path = path / key.file_name
        found = load_calibration(path) if path.is_file() else None
        return found if found is not None and found.key == key else None
    found = load_calibration(path)
    for name in ("device", "dtype", "shape", "tensor_parallel_size", "kv_dtype"):
        if getattr(found.key, name) != getattr(key, name):
            raise ValueError(f"calibration must be for {name} {getattr(key, name)!r}, got {str(path)!r}, which is for "
                             f"{getattr(found.key, name)!r}")
    return found
