"""SelectionConfig: numbers of units, tails, validation."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.speculation.selection import SelectionConfig


@st.composite
def configs(draw: st.DrawFn) -> SelectionConfig:
    unit = draw(st.sampled_from([1, 2, 4, 16]))
    tokens = st.integers(0, 40).map(lambda n: n * unit)
    by_share = draw(st.booleans())
    return SelectionConfig(unit=unit, sinks=draw(tokens), window=draw(tokens) + unit,
                           budget=0 if by_share else draw(tokens) + unit,
                           share=draw(st.floats(0.01, 1.0)) if by_share else 0.0, floor=draw(tokens))


@given(configs(), st.integers(1, 5000), st.integers(0, 20))
def test_the_three_ranges_never_overlap_and_keep_to_the_budget(config: SelectionConfig, context: int,
                                                               drafted: int) -> None:
    """Planted fault: the tail rounded up instead of down."""
    check_ranges(config, context, drafted)


@given(configs())
def test_the_ranges_where_the_budget_nearly_covers_the_context(config: SelectionConfig) -> None:
    """Planted fault: one unit more than the budget leaves for selected ones."""
    covered = max(1, config.allowance(1000))
    for context in range(covered, covered + 2 * config.unit + 1):
        check_ranges(config, context, 3)


def check_ranges(config: SelectionConfig, context: int, drafted: int) -> None:
    tail, units = config.tail_start(context), config.num_units(context)
    assert tail % config.unit == 0
    if tail == 0:
        assert units == 0
        assert config.tokens_read(context, drafted) == context + drafted
        return
    assert context - tail >= config.window, "the window is always in"
    assert context - tail < config.window + config.unit
    assert config.sinks + units * config.unit <= tail, "sinks and units lie below the tail"
    assert config.tokens_read(context, drafted) <= context + drafted
    allowed = max(config.allowance(context), config.sinks + config.window)
    assert config.tokens_read(context, 0) < allowed + config.unit
    assert config.tokens_read(context, drafted) == config.tokens_read(context, 0) + drafted
    below, listed = config.tail_start(context) - config.sinks, config.num_units(context) * config.unit
    assert config.tokens_skipped(context) == below - listed


@given(configs(), st.integers(1, 5000))
def test_capacity_holds_every_shorter_context(config: SelectionConfig, longest: int) -> None:
    capacity = config.capacity(longest)
    assert capacity >= 1
    assert all(config.num_units(context) <= capacity for context in range(1, longest + 1, 7))


@given(configs(), st.sampled_from([1, 4, 16]))
def test_other_units_keep_at_least_the_tokens(config: SelectionConfig, unit: int) -> None:
    moved = config.at_unit(unit)
    assert moved.unit == unit
    assert moved.sinks >= config.sinks
    assert moved.window - config.window in range(unit)


def test_published_budget() -> None:
    """Page 16, max(32 pages, 7 %), last 8 pages in: 32 pages up to 7,314 tokens, then 7 %."""
    config = SelectionConfig(unit=16, sinks=0, window=128, budget=0, share=0.07, floor=512)
    assert config.num_units(4096) == 24
    assert config.num_units(32768) == 144 - 8
    assert config.tail_start(4096) == 3968


@pytest.mark.parametrize(("field", "value"), [
    ("unit", 0), ("sinks", 3), ("window", 0), ("window", 6), ("budget", 10), ("budget", -4), ("share", 1.5),
    ("share", float("nan")), ("floor", 2), ("coverage", 0.0), ("coverage", 1.2), ("reduce", "median"),
    ("queries", -1), ("merge", "sum"), ("mix", -0.5)])
def test_bad_values_are_named(field: str, value: object) -> None:
    good = SelectionConfig(unit=4, sinks=4, window=64, budget=512)
    with pytest.raises(ValueError, match=rf"selection\.{field} must be .*{value!r}"):
        replace(good, **{field: value})


def test_a_budget_is_needed() -> None:
    with pytest.raises(ValueError, match="budget"):
        SelectionConfig(budget=0)
