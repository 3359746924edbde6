"""Selections to compare: the presets', and variants of them that differ in one thing."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from aspire.model.spec import ModelSpec
from aspire.speculation.cadence import Cadence
from aspire.speculation.policy import NO_OVERRIDES, Overrides, Policy, resolve_policy


@dataclass(frozen=True, slots=True)
class Variant:
    """A preset with changes. depths: refresh layers as fractions of the depth, None: the preset's.
    budgets: False where a budget changes nothing."""

    preset: str
    overrides: Overrides = NO_OVERRIDES
    depths: tuple[float, ...] | None = None
    budgets: bool = True


_PAGES = Overrides(unit=16)
_FOUR = (0.2, 0.4, 0.6, 0.8)

VARIANTS: "MappingProxyType[str, Variant]" = MappingProxyType({
    "full": Variant("autoregressive", budgets=False),
    "streaming": Variant("streaming"),
    "aspire-paper": Variant("aspire-paper"),
    "pillar": Variant("pillar"),
    "pillar-page16": Variant("pillar", _PAGES),
    "aspire": Variant("aspire"),
    "aspire-page16": Variant("aspire", _PAGES),
    "refresh-0": Variant("aspire", depths=()),
    "refresh-2": Variant("aspire", depths=(1 / 3, 2 / 3)),
    "refresh-3": Variant("aspire", depths=(0.25, 0.5, 0.75)),
    "refresh-4": Variant("aspire", depths=_FOUR),
    "refresh-4-page16": Variant("aspire", _PAGES, depths=_FOUR),
    "refresh-6": Variant("aspire", depths=(0.1, 0.2, 0.35, 0.5, 0.65, 0.8)),
    "refresh-4-early": Variant("aspire", depths=(0.1, 0.25, 0.4, 0.6)),
    "refresh-0-queries1": Variant("aspire", Overrides(queries=1), depths=()),
    "refresh-0-queries2": Variant("aspire", Overrides(queries=2), depths=()),
    "aspire-queries1": Variant("aspire", Overrides(queries=1)),
    "aspire-queries2": Variant("aspire", Overrides(queries=2)),
    "aspire-queries-all": Variant("aspire", Overrides(queries=0)),
    "aspire-mix": Variant("aspire", Overrides(merge="mix", mix=0.5)),
    "aspire-mix2": Variant("aspire", Overrides(merge="mix", mix=2.0)),
    "aspire-cover90": Variant("aspire", Overrides(coverage=0.9)),
    "aspire-every2": Variant("aspire", Overrides(refresh_every=2)),
    "aspire-every3": Variant("aspire", Overrides(refresh_every=3)),
    "aspire-every4": Variant("aspire", Overrides(refresh_every=4)),
    "aspire-every3-own": Variant("aspire", Overrides(refresh_every=3, between="layer")),
    "aspire-every4-own": Variant("aspire", Overrides(refresh_every=4, between="layer")),
    "aspire-every6-own": Variant("aspire", Overrides(refresh_every=6, between="layer")),
    "refresh-4-every2": Variant("aspire", Overrides(refresh_every=2), depths=_FOUR),
    "refresh-4-every3": Variant("aspire", Overrides(refresh_every=3), depths=_FOUR),
    "refresh-4-every4": Variant("aspire", Overrides(refresh_every=4), depths=_FOUR),
    "aspire-max": Variant("aspire", Overrides(reduce="max")),
})
DEFAULT_SELECTIONS = ("full", "streaming", "aspire-paper", "pillar", "pillar-page16", "refresh-0", "aspire",
                      "aspire-page16", "refresh-4", "refresh-4-page16")


def find_selections(names: Sequence[str]) -> dict[str, Variant]:
    """Variants by name; "all" is every one. Raises ValueError for an unknown name."""
    found: dict[str, Variant] = {}
    for name in names:
        if name != "all" and name not in VARIANTS:
            raise ValueError(f"selections must be among {', '.join(VARIANTS)}, or all, got {name!r}")
        found |= VARIANTS if name == "all" else {name: VARIANTS[name]}
    return found


def layers_at(depths: Sequence[float], seeing: Sequence[int]) -> tuple[int, ...]:
    """The layers of `seeing` at those fractions of their number, ascending, each at most once; the last one has no
    layer above it to serve and is left out."""
    places = {int(depth * len(seeing) + 0.5) for depth in depths}
    return tuple(seeing[place] for place in sorted(places) if place < len(seeing) - 1)


def variant_policy(variant: Variant, spec: ModelSpec, cadence: Cadence, changes: Overrides = NO_OVERRIDES) -> Policy:
    """The variant for a model, with that cadence. changes: further overrides, which win.

    Raises ValueError for overrides that the preset cannot take.
    """
    overrides = merge(variant.overrides, changes)
    if variant.depths is not None and overrides.refresh is None:
        seeing = [layer for layer in range(spec.num_layers) if not spec.windows or spec.windows[layer] is None]
        overrides = replace(overrides, refresh=layers_at(variant.depths, seeing))
    policy = resolve_policy(variant.preset, spec.num_layers, spec.windows, overrides)
    return replace(policy, cadence=cadence, estimator="survival")


def merge(base: Overrides, changes: Overrides) -> Overrides:
    """`base` with what `changes` sets."""
    given = {field.name: getattr(changes, field.name) for field in fields(Overrides)
             if getattr(changes, field.name) is not None}
    return replace(base, **given)
