"""Grammar-forced tokens: drafted without a model step, verified with the rest, and the output stays the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from aspire.config import EngineOptions
from aspire.request import RequestOutput, SamplingParams, StructuredOutputs
from aspire.speculation.policy import Overrides
from aspire.testing.engines import TestBed, run, tiny_bed

pytest.importorskip("xgrammar")
FORCED = StructuredOutputs(regex=r'\{"identifier": "[a-c]{3}", "value": [0-9]{2}\}')
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=60, structured_outputs=FORCED)
PROMPTS = [[65, 66, 67] * 20, [70, 71] * 15]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> TestBed:
    return tiny_bed(Path(tmp_path_factory.mktemp("tiny")))


def outputs_of(bed: TestBed, options: EngineOptions, params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return run(bed.engine(options), PROMPTS, [params, replace(params, structured_outputs=None)])


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
@pytest.mark.parametrize("policy", ["aspire", "synchronized-aspire"])
def test_tokens_equal_plain_decoding(bed: TestBed, policy: str, loop: str) -> None:
    """Planted fault: forced drafts written one column early."""
    expected = outputs_of(bed, {"policy": "autoregressive"})
    got = outputs_of(bed, {"policy": policy, "overrides": Overrides(budget=32, window=8),
                           "loop": loop})  # type: ignore[typeddict-item]
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in expected]
    assert got[0].outputs[0].text.startswith('{"identifier": "')


def test_forced_tokens_cost_no_draft_step(bed: TestBed) -> None:
    """All 28 fixed characters of the pattern are drafts for free: far fewer rows than tokens, none of them rejected."""
    engine = bed.engine({"policy": "aspire", "max_num_seqs": 1})
    rows: list[str] = []

    class Watch:
        def on_step(self, stats: object) -> None:
            rows.extend(row.kind for row in stats.rows)  # type: ignore[attr-defined]

        def close(self) -> None: ...

    engine.observers.append(Watch())
    output = run(engine, PROMPTS[:1], PARAMS)[0]
    assert output.metrics is not None
    assert output.metrics.num_drafted >= 28
    assert rows.count("draft") <= len(output.outputs[0].token_ids) - 28
    assert output.metrics.num_accepted >= output.metrics.num_drafted - 1  # the last draft may be the end itself


def test_a_request_that_leaves_its_grammar_ends(bed: TestBed) -> None:
    """A ban on the only token that the grammar allows leaves nothing to pick: the request ends, the other goes on.

    Planted fault: Done.broken left empty; the output then ran to max_tokens without its grammar.
    """
    banned = replace(PARAMS, logit_bias={ord("{"): -100.0}, bad_words=("{",))
    constrained, free = outputs_of(bed, {"policy": "aspire", "overrides": Overrides(budget=32, window=8)}, banned)
    assert constrained.outputs[0].finish_reason == "abort"
    assert len(constrained.outputs[0].token_ids) < 3
    assert len(free.outputs[0].token_ids) > 3


@pytest.mark.parametrize("changes", [{"min_tokens": 20}, {"ignore_eos": True}], ids=["min_tokens", "ignore_eos"])
def test_an_output_ends_with_its_grammar(bed: TestBed, changes: dict[str, int]) -> None:
    """Planted fault: EOS before min_tokens did not stop, and what followed was bound by nothing."""
    params = replace(PARAMS, structured_outputs=StructuredOutputs(regex="ab"), **changes)
    output = outputs_of(bed, {"policy": "aspire"}, params)[0].outputs[0]
    assert (output.text, output.finish_reason) == ("ab", "stop")


def test_one_of_several_outputs_may_leave_its_grammar(bed: TestBed) -> None:
    """Planted fault: all outputs of the request ended with the first that had nothing left to pick."""
    choice = StructuredOutputs(regex="(a[0-9]{12}|bz)")
    params = replace(PARAMS, n=8, structured_outputs=choice, bad_words=("z",))
    engine = bed.engine({"policy": "aspire", "max_num_seqs": 8})
    outputs = run(engine, PROMPTS[:1], params)[0].outputs
    reasons = {output.finish_reason for output in outputs}
    assert reasons == {"abort", "stop"}, "some outputs took the branch that the ban closes, some did not"
    assert all(len(output.text) == 13 for output in outputs if output.finish_reason == "stop")
