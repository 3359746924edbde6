"""SamplingParams refuse what would only fail in a step, and take None where vLLM does."""

from typing import Any

import pytest

from aspire.request import SamplingParams, StructuredOutputs


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", 1e300), ("temperature", -0.1), ("temperature", float("nan")), ("top_k", 10**12), ("top_p", 0.0),
    ("top_p", 1.5), ("min_p", 2.0), ("repetition_penalty", 1e300), ("repetition_penalty", 0.0), ("min_tokens", 1 << 40),
    ("max_tokens", 0), ("max_tokens", -3), ("n", 0), ("stop", 3), ("stop", ["a", ""]), ("stop_token_ids", 5),
    ("bad_words", "abc"), ("logit_bias", "x"), ("logit_bias", {-1: 1.0}), ("structured_outputs", {"regex": "a"}),
    ("seed", "x"), ("logprobs", 21), ("presence_penalty", 3.0)])
def test_a_bad_value_is_named(field: str, value: Any) -> None:
    """Planted fault: no upper bounds; the value then overflowed in a step and took the engine down."""
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{"max_tokens": None, field: value})


def test_none_is_the_default_of_lists() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)
    assert (params.stop_strings, params.stop_ids, params.banned_words) == ((), (), ())


def test_choices_are_a_list() -> None:
    with pytest.raises(ValueError, match="choice"):
        StructuredOutputs(choice="abc")  # type: ignore[arg-type]
