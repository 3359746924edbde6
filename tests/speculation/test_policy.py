"""Presets as data, and how they meet models."""

import pytest

from aspire.speculation.acceptance import PublishedEstimator, SurvivalEstimator
from aspire.speculation.cadence import Adaptive, Always, Lockstep, NeverVerify, Staggered
from aspire.speculation.direct import Direct
from aspire.speculation.policy import PRESET_NAMES, Overrides, resolve_policy


def test_names() -> None:
    assert PRESET_NAMES == (
        "autoregressive", "streaming", "pillar", "aspire-paper", "aspire", "delta", "synchronized-streaming",
        "synchronized-pillar", "synchronized-aspire-paper", "synchronized-aspire")


@pytest.mark.parametrize("name", PRESET_NAMES)
@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 30, 80])
def test_every_preset_fits_every_depth(name: str, num_layers: int) -> None:
    policy = resolve_policy(name, num_layers)
    assert policy.layers.num_layers == num_layers
    assert policy.lossless == (name != "delta")
    assert policy.new_estimator().survival("new", policy.draft_limit) is not None
    if num_layers > 1 and name != "autoregressive":
        assert len(policy.layers.full_layers) < num_layers or name == "delta"


def test_default_preset() -> None:
    """Rounds of the longest kind fill one attention tile: 64 rows for groups of 4 heads. Planted fault: a limit of
    16."""
    policy = resolve_policy("aspire", 30)
    assert policy.layers.full_layers == (20,)
    assert policy.layers.num_lists == 20 + 1
    assert policy.selection.budget == 512
    assert isinstance(policy.cadence, Direct)
    assert (policy.draft_limit + 1) * 4 == 64
    assert isinstance(policy.new_estimator(), SurvivalEstimator)
    assert policy.speculates
    assert resolve_policy("aspire", 32).layers.full_layers == (21,)
    four = resolve_policy("aspire", 30, overrides=Overrides(refresh=(6, 12, 18, 24), drafts=16))
    assert four.layers.full_layers == (6, 12, 18, 24)
    assert four.layers.num_lists == 6 + 4
    assert four.draft_limit == 16


def test_published_preset() -> None:
    policy = resolve_policy("aspire-paper", 36)
    assert policy.layers.full_layers == (34,)
    assert policy.layers.apply == "next_step"
    assert policy.selection.unit == 16
    assert policy.selection.num_units(4096) == 24
    assert policy.selection.reduce == "max"
    assert policy.selection.queries == 2
    assert policy.cadence == Adaptive(16, first_length=3)
    assert isinstance(policy.new_estimator(), PublishedEstimator)


def test_relatives() -> None:
    assert resolve_policy("autoregressive", 4).cadence == Always()
    assert resolve_policy("streaming", 4).cadence == Staggered(6)
    assert resolve_policy("streaming", 4).selection.num_units(10_000) == 0
    assert resolve_policy("synchronized-streaming", 4).cadence == Lockstep(6)
    assert resolve_policy("pillar", 4).cadence == Staggered(8)
    assert resolve_policy("pillar", 4).layers.full_layers == ()
    delta = resolve_policy("delta", 32)
    assert delta.cadence == NeverVerify()
    assert delta.layers.full_layers == (0, 1, 2, 16, 25)
    assert delta.sparse_emits
    assert not delta.speculates
    assert delta.selection.num_units(10_000) == 56


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_windowed_layers_keep_no_list_and_refresh_nothing(name: str) -> None:
    """Gemma 3's pattern: five sliding layers, then one that sees everything. Planted fault: depths over all layers."""
    windows = tuple(None if layer % 6 == 5 else 1024 for layer in range(30))
    plan = resolve_policy(name, 30, windows).layers
    for layer in range(30):
        if windows[layer] is not None:
            assert plan.reads[layer] is None
            assert plan.verify_writes[layer] == plan.draft_writes[layer] == ()


def test_windows_everywhere_mean_nothing_to_select() -> None:
    assert resolve_policy("aspire", 4, (128,) * 4).layers.num_lists == 0


def test_two_resolved_policies_share_no_memory() -> None:
    assert resolve_policy("aspire", 4).cadence is not resolve_policy("aspire", 4).cadence


def test_overrides() -> None:
    policy = resolve_policy("aspire", 30, overrides=Overrides(
        drafts=6, refresh=(10, 20), unit=16, budget=256, coverage=0.9, min_draft=1, judge="rejection"))
    assert policy.layers.full_layers == (10, 20)
    assert policy.draft_limit == 6
    assert (policy.selection.unit, policy.selection.sinks, policy.selection.budget) == (16, 16, 256)
    assert policy.judge == "rejection"
    assert resolve_policy("synchronized-pillar", 4, overrides=Overrides(drafts=3)).cadence == Lockstep(3)
    assert resolve_policy("aspire", 4, overrides=Overrides(share=0.1)).selection.num_units(10_000) == 1000 - 68
    streaming = resolve_policy("streaming", 4, overrides=Overrides(budget=256)).selection
    assert streaming.window == 252
    assert resolve_policy("aspire-paper", 4, overrides=Overrides(refresh=(1,))).layers.full_layers == (1,)
    plain = resolve_policy("aspire", 8).layers
    assert resolve_policy("aspire", 8, overrides=Overrides(refresh_every=1)).layers == plain
    for name in ("aspire", "synchronized-aspire", "aspire-paper", "synchronized-aspire-paper"):
        assert resolve_policy(name, 8, overrides=Overrides(refresh_every=3)).layers.refresh_every == 3
    own = resolve_policy("aspire", 8, overrides=Overrides(refresh_every=2, between="layer")).layers
    assert own.num_lists == 8


@pytest.mark.parametrize(("name", "overrides", "words"), [
    ("aspyre", Overrides(), "policy must be one of autoregressive, .*'aspyre'"),
    ("aspire", Overrides(drafts=0), "direct.draft_limit.*0"),
    ("aspire", Overrides(refresh=(9,)), "refresh"),
    ("aspire", Overrides(unit=0), "selection.unit"),
    ("aspire", Overrides(budget=-5), "selection.budget"),
    ("aspire", Overrides(min_draft=17), "direct.min_draft"),
    ("pillar", Overrides(min_draft=0), "min_draft"),
    ("autoregressive", Overrides(drafts=3), "drafts"),
    ("streaming", Overrides(refresh=(1,)), "refresh"),
    ("aspire-paper", Overrides(refresh=(1, 2)), "refresh"),
    ("aspire", Overrides(refresh_every=0), "refresh_every.*0"),
    ("delta", Overrides(refresh_every=2), "refresh_every.*2"),
    ("pillar", Overrides(refresh_every=2), "refresh_every.*2"),
    ("streaming", Overrides(refresh_every=2), "refresh_every.*2"),
    ("aspire", Overrides(between="layer"), "between.*layer"),
    ("aspire-paper", Overrides(refresh_every=2, between="layer"), "between.*layer"),
])
def test_bad_requests_are_named(name: str, overrides: Overrides, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_policy(name, 8, overrides=overrides)
