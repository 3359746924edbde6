"""A policy = layer plan + selection + cadence + estimator, as data. The presets are named recipes for any model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeVar

from aspire.speculation.acceptance import AcceptanceEstimator, PublishedEstimator, SurvivalEstimator
from aspire.speculation.cadence import Adaptive, Always, Cadence, Lockstep, NeverVerify, Staggered
from aspire.speculation.direct import Direct
from aspire.speculation.layers import (
    Between,
    LayerPlan,
    dense_plan,
    per_layer_lists,
    selecting_layers,
    shared_list,
    static_list,
)
from aspire.speculation.selection import SelectionConfig

EstimatorKind = Literal["survival", "published"]
Judge = Literal["shared-noise", "rejection"]
Plan = Literal["dense", "static", "per-layer", "shared", "selecting"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What an engine runs. Build with `resolve_policy`; the cadence belongs to one engine (it may remember)."""

    name: str
    lossless: bool
    layers: LayerPlan
    selection: SelectionConfig
    cadence: Cadence
    estimator: EstimatorKind = "survival"
    judge: Judge = "shared-noise"

    @property
    def draft_limit(self) -> int:
        return self.cadence.draft_limit

    @property
    def sparse_emits(self) -> bool:
        """Whether sparse rows' picks are output: policies that never verify."""
        return not self.lossless

    @property
    def speculates(self) -> bool:
        return self.lossless and self.draft_limit > 0

    def new_estimator(self) -> AcceptanceEstimator:
        if self.estimator == "published":
            return PublishedEstimator()
        return SurvivalEstimator(limit=max(1, self.draft_limit))


@dataclass(frozen=True, slots=True)
class Preset:
    """A recipe. `depths`: places of refresh or selecting layers as fractions of the depth ("per-layer", "selecting").
    `refresh_every`: see LayerPlan.
    `cadence` takes the draft length or limit (`drafts` unless overridden)."""

    summary: str
    plan: Plan
    selection: SelectionConfig
    cadence: Callable[[int], Cadence]
    drafts: int
    depths: tuple[float, ...] = ()
    estimator: EstimatorKind = "survival"
    lossless: bool = True
    refresh_every: int = 1


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a user or a calibration changes in a preset; None keeps it.

    drafts: draft length (lock step, staggered) or limit (adaptive rules). refresh: layer indices. min_draft: 0 lets
    `aspire` stop speculating, 1 always drafts. With `unit`, the preset's own token counts are rounded up to it.
    refresh_every: drafts from one renewal of the lists to the next. between: what is read meanwhile, see
    `per_layer_lists`.
    """

    drafts: int | None = None
    refresh: tuple[int, ...] | None = None
    refresh_every: int | None = None
    between: Between | None = None
    unit: int | None = None
    sinks: int | None = None
    window: int | None = None
    budget: int | None = None
    share: float | None = None
    coverage: float | None = None
    queries: int | None = None
    reduce: Literal["mean", "max"] | None = None
    merge: Literal["replace", "mix"] | None = None
    mix: float | None = None
    min_draft: int | None = None
    judge: Judge | None = None


T = TypeVar("T")
NO_OVERRIDES = Overrides()

_PER_LAYER = SelectionConfig(unit=1, sinks=4, window=64, budget=512, reduce="mean", queries=4)
_SINKS_WINDOW = SelectionConfig(unit=1, sinks=4, window=508, budget=512)
_PILLAR = SelectionConfig(unit=1, sinks=4, window=64, budget=0, share=0.05, floor=256, reduce="mean", queries=0)
_PUBLISHED = SelectionConfig(unit=16, sinks=0, window=128, budget=0, share=0.07, floor=512, reduce="max", queries=2)
_DELTA = SelectionConfig(unit=16, sinks=0, window=128, budget=1024, reduce="max", queries=2)
_REFRESH = (2 / 3,)  # more layers accept more and read more: docs/log/acceptance.md
_DRAFTS = 15  # a verification of 16 tokens times 4 query heads a group fills one attention tile of 64

PRESETS: "MappingProxyType[str, Preset]" = MappingProxyType({
    "autoregressive": Preset("plain decoding", "dense", _PER_LAYER, lambda _: Always(), 0),
    "streaming": Preset("drafts see sinks and a window; verifications spread over the steps",
                        "static", _SINKS_WINDOW, Staggered, 6),
    "pillar": Preset("lists from the last verification's scores; verifications spread over the steps",
                     "per-layer", _PILLAR, Staggered, 8),
    "aspire-paper": Preset("one list renewed at every draft by the second to last layer; the published rule",
                           "shared", _PUBLISHED, Adaptive, 16, estimator="published"),
    "aspire": Preset("per-layer lists, renewed at two thirds of the depth; each request drafts as long as it pays",
                     "per-layer", _PER_LAYER, Direct, _DRAFTS, _REFRESH),
    "delta": Preset("a few layers select for those above, nothing is verified: lossy",
                    "selecting", _DELTA, lambda _: NeverVerify(), 0, (0.07, 0.5, 0.78), lossless=False),
    "synchronized-streaming": Preset("streaming, all draft then all verify",
                                     "static", _SINKS_WINDOW, Lockstep, 6),
    "synchronized-pillar": Preset("pillar, all draft then all verify", "per-layer", _PILLAR, Lockstep, 6),
    "synchronized-aspire-paper": Preset("aspire-paper's selection, all draft then all verify",
                                        "shared", _PUBLISHED, Lockstep, 8, estimator="published"),
    "synchronized-aspire": Preset("aspire's selection, all draft then all verify",
                                  "per-layer", _PER_LAYER, Lockstep, 8, _REFRESH),
})
PRESET_NAMES: tuple[str, ...] = tuple(PRESETS)


def resolve_policy(name: str, num_layers: int, windows: tuple[int | None, ...] = (),
                   overrides: Overrides = NO_OVERRIDES) -> Policy:
    """The preset `name` for a model. windows: sliding window of each layer, None where it sees everything; empty: no
    layer slides. Windowed layers read what they always read and keep no list.

    Raises ValueError for an unknown name, and for overrides the preset cannot take.
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise ValueError(f"policy must be one of {', '.join(PRESET_NAMES)}, got {name!r}")
    if windows and len(windows) != num_layers:
        raise ValueError(f"windows must have one entry for each of the {num_layers} layers, got {len(windows)}")
    seeing = tuple(layer for layer in range(num_layers) if not windows or windows[layer] is None)
    layers = _layer_plan(preset, num_layers, seeing, overrides)
    return Policy(name, preset.lossless, layers, _selection(preset.selection, overrides),
                  _cadence(name, preset, overrides), preset.estimator, overrides.judge or "shared-noise")


def _layer_plan(preset: Preset, num_layers: int, seeing: tuple[int, ...],
                overrides: Overrides) -> LayerPlan:
    """seeing: the layers that attend to everything; only they can refresh or keep a list."""
    refresh, every = overrides.refresh, _refresh_every(preset, overrides)
    dense = tuple(layer for layer in range(num_layers) if layer not in seeing)
    if refresh is not None and preset.plan not in ("per-layer", "shared", "selecting"):
        raise ValueError(f"refresh must not be given for a policy without selection lists, got {list(refresh)}")
    if preset.plan == "dense" or not seeing:
        return dense_plan(num_layers)
    if preset.plan == "static":
        return static_list(num_layers, dense)
    if preset.plan == "per-layer":
        return per_layer_lists(num_layers, _at_depths(preset.depths, seeing) if refresh is None else refresh, dense,
                               refresh_every=every, between=overrides.between or "group")
    if preset.plan == "shared":
        if refresh is not None and len(refresh) != 1:
            raise ValueError(f"refresh must be one layer for this policy, got {list(refresh)}")
        return shared_list(num_layers, seeing[max(0, len(seeing) - 2)] if refresh is None else refresh[0], dense,
                           refresh_every=every)
    first_two = tuple(layer for layer in (0, 1) if layer not in dense and layer < num_layers)
    selecting = _at_depths(preset.depths, seeing) if refresh is None else refresh
    return selecting_layers(num_layers, selecting, tuple(sorted({*dense, *first_two} - set(selecting))))


def _refresh_every(preset: Preset, overrides: Overrides) -> int:
    """Refused where it would change nothing, and without verifications: those set the lists to read meanwhile."""
    every = _given(overrides.refresh_every, preset.refresh_every)
    if every < 1:
        raise ValueError(f"refresh_every must be an integer >= 1, got {every!r}")
    may_renew = preset.plan == "shared" or (preset.plan == "per-layer" and bool(overrides.refresh or preset.depths))
    if every > 1 and not may_renew:
        raise ValueError(f"refresh_every must be 1 for a policy without refresh layers or without verification, "
                         f"got {every!r}")
    if overrides.between not in (None, "group") and (every == 1 or preset.plan != "per-layer"):
        raise ValueError(f"between must only be given for lists per layer and refresh_every above 1, "
                         f"got {overrides.between!r}")
    return every


def _at_depths(depths: tuple[float, ...], seeing: tuple[int, ...]) -> tuple[int, ...]:
    """The layers at those fractions of the depth that have a layer above them to serve."""
    places = {int(depth * len(seeing) + 0.5) for depth in depths}
    return tuple(seeing[place] for place in sorted(places) if place < len(seeing) - 1)


def _selection(selection: SelectionConfig, overrides: Overrides) -> SelectionConfig:
    if overrides.unit is not None:
        if overrides.unit < 1:
            raise ValueError(f"selection.unit must be an integer >= 1, got {overrides.unit!r}")
        selection = selection.at_unit(overrides.unit)
    budget, window = overrides.budget, overrides.window
    if overrides.share is not None and budget is None:
        budget = 0
    if budget and window is None and selection.window + selection.sinks == selection.budget:
        window = max(selection.unit, budget - selection.sinks)  # all tail: the window is the budget
    return replace(
        selection,
        sinks=_given(overrides.sinks, selection.sinks), window=_given(window, selection.window),
        budget=_given(budget, selection.budget), share=_given(overrides.share, selection.share),
        coverage=selection.coverage if overrides.coverage is None else overrides.coverage,
        queries=_given(overrides.queries, selection.queries), reduce=overrides.reduce or selection.reduce,
        merge=overrides.merge or selection.merge, mix=_given(overrides.mix, selection.mix))


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _cadence(name: str, preset: Preset, overrides: Overrides) -> Cadence:
    drafts = preset.drafts if overrides.drafts is None else overrides.drafts
    if overrides.drafts is not None and preset.drafts == 0:
        raise ValueError(f"drafts must not be given for policy {name}, got {overrides.drafts!r}")
    if overrides.min_draft is not None:
        if name != "aspire":
            raise ValueError(f"min_draft must only be given for policy aspire, got {overrides.min_draft!r} for {name}")
        return Direct(drafts, min_draft=overrides.min_draft)
    return preset.cadence(drafts)
