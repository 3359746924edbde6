"""End to end on a tiny model: batches that mix penalties, biases, bans, grammars, logprobs and stops give the same
tokens, texts and log probabilities whatever the policy and the loop."""

import json
import math
from collections.abc import Sequence

import pytest
import torch

from aspire.config import EngineOptions
from aspire.request import RequestOutput, SamplingParams, StructuredOutputs
from aspire.speculation.policy import Overrides
from aspire.testing.engines import TestBed, run, tiny_bed

pytest.importorskip("xgrammar")

SCHEMA = {"type": "object", "required": ["a", "b"], "properties": {
    "a": {"type": "string", "maxLength": 5}, "b": {"enum": [1, 22, None]}}}
COMMON = {"max_tokens": 24, "seed": 5}
MENU = [
    SamplingParams(temperature=0.9, presence_penalty=1.0, frequency_penalty=0.7, logprobs=3, **COMMON),
    SamplingParams(temperature=0.0, repetition_penalty=1.6, ignore_eos=True, logprobs=0, **COMMON),
    SamplingParams(temperature=1.0, structured_outputs=StructuredOutputs(json=SCHEMA), max_tokens=200, seed=9),
    SamplingParams(temperature=1.0, logit_bias={65: 30.0, 66: 29.0, 67: 28.5}, bad_words=["AB", "AAA", "C"], **COMMON),
    SamplingParams(temperature=0.8, min_tokens=20, logit_bias={257: 30.0, 70: 20.0, 71: 20.0}, **COMMON),
    SamplingParams(temperature=1.0, logit_bias={97: 30.0, 98: 30.0, 99: 28.5}, stop=["abc", "bba"],
                   include_stop_str_in_output=True, logprobs=1, prompt_logprobs=2, **COMMON),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=50, frequency_penalty=-0.5, logprobs=5, **COMMON),
    SamplingParams(temperature=1.0, structured_outputs=StructuredOutputs(choice=("maybe", "never", "always")),
                   logprobs=2, **COMMON),
]
PLAIN: EngineOptions = {"policy": "autoregressive", "max_num_seqs": 1, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> TestBed:
    return tiny_bed(tmp_path_factory.mktemp("tiny"))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (40, 90, 61, 33, 75, 50, 120, 20)]


@pytest.fixture(scope="module")
def expected(bed: TestBed) -> list[RequestOutput]:
    return run(bed.engine(PLAIN), prompts(), MENU)


def seen(outputs: Sequence[RequestOutput]) -> list[object]:
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason,
             [(entry.token_id, entry.rank, [token for token, _ in entry.top]) for entry in one.logprobs or ()])
            for output in outputs for one in output.outputs]


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize(("policy", "overrides"), [
    ("aspire", Overrides(budget=32, window=8)), ("streaming", Overrides(budget=24)),
    ("synchronized-pillar", Overrides(budget=32, window=8))])
def test_equal_to_plain_decoding(bed: TestBed, expected: list[RequestOutput], policy: str, overrides: Overrides,
                                 loop: str) -> None:
    """Token ids, text, reasons, ranks and top tokens are equal; log probabilities to float32 rounding of the model.

    Fails when drafts are not counted in penalties, when a commit counts one token too few, when the mask of a
    verification is shifted by one."""
    options: EngineOptions = {"policy": policy, "overrides": overrides, "max_num_seqs": 5}
    options["loop"] = loop  # type: ignore[typeddict-item]
    outputs = run(bed.engine(options), prompts(), MENU)
    assert seen(outputs) == seen(expected)
    for output, reference in zip(outputs, expected, strict=True):
        for entry, other in zip(output.outputs[0].logprobs or (), reference.outputs[0].logprobs or (), strict=True):
            assert math.isclose(entry.logprob, other.logprob, abs_tol=1e-4)
        assert (output.prompt_logprobs is None) == (reference.prompt_logprobs is None)
        for token, known in zip(output.prompt_logprobs or (), reference.prompt_logprobs or (), strict=True):
            assert (token is None) == (known is None)
            if token is not None and known is not None:
                assert math.isclose(token.logprob, known.logprob, abs_tol=1e-4)


def test_each_option_does_what_it_says(expected: list[RequestOutput]) -> None:
    """The menu is not idle: without its option each of these outputs would look different."""
    one = [output.outputs[0] for output in expected]
    value = json.loads(one[2].text)
    assert set(value) == {"a", "b"}
    assert value["b"] in (1, 22, None)
    assert one[7].text in ("maybe", "never", "always")
    text = bytes(one[3].token_ids).decode(errors="replace")
    assert "A" in text
    assert "AB" not in text
    assert "AAA" not in text
    assert "C" not in text
    assert len(one[4].token_ids) == 21  # 20 tokens, then the EOS that the bias asks for
    assert one[4].finish_reason == "stop"
    assert one[5].stop_reason in ("abc", "bba")
    assert one[5].text.endswith(str(one[5].stop_reason))
    assert [entry.token_id for entry in one[1].logprobs or ()] == list(one[1].token_ids)
    assert expected[5].prompt_logprobs is not None
    assert len(expected[5].prompt_logprobs) == 50
    assert expected[5].prompt_logprobs[0] is None
