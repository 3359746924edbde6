"""What a new owner's slot holds on the device: its own values, whoever had the slot before."""

from pathlib import Path

import pytest

from aspire.ops.sample.rows import seed_bits
from aspire.request import SamplingParams
from aspire.runtime.runner import Runner
from aspire.testing.engines import TestBed, tiny_bed

PARAMS = (
    SamplingParams(max_tokens=4, temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=-(1 << 40)),
    SamplingParams(max_tokens=4, temperature=0.0, seed=3, logit_bias={7: 2.5}, min_tokens=2, ignore_eos=True),
    SamplingParams(max_tokens=4, temperature=1.5, top_k=-1, seed=(1 << 64) - 5, presence_penalty=0.5, logprobs=1),
)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> TestBed:
    return tiny_bed(Path(tmp_path_factory.mktemp("model")))


def test_slots_hold_the_values_of_their_owners(bed: TestBed) -> None:
    """All three arrive in one step, then each in the slot of another.

    Planted faults: top_p and min_p exchanged; fractions converted to integers on the way; slots as they come, not as
    admitted; an adjustment that is not wanted any more left as it was; a request that wants log probabilities
    remembered after its end.
    """
    engine = bed.engine({"loop": "plain"})
    runner = engine.loop.runner
    assert isinstance(runner, Runner)
    engine.add("holds slot 0", [5], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()
    for turn in (0, 1):
        for index in range(3):
            engine.add(f"{turn}-{index}", [5, 6, 7 + index], PARAMS[(index + turn) % 3])
        engine.step()
        owners = {request.slot: request for request in engine.scheduler.running if request.slot}
        assert len(owners) == 3
        for slot, request in owners.items():
            assert slot is not None
            params, sampling = request.params, runner.sampling
            held = [table[slot].item() for table in (sampling.temperature, sampling.top_p, sampling.min_p)]
            assert held == pytest.approx([params.temperature, params.top_p, params.min_p])
            assert (sampling.top_k[slot], sampling.seed[slot]) == (max(0, params.top_k), seed_bits(request.seed))
            assert sampling.shows([slot]) == (params.logprobs is not None)
            assert runner.state.num_known[slot] == request.num_known
            assert runner.pipeline.needed([slot]) == bool(params.logit_bias or params.presence_penalty)
        penalties, bias = runner.pipeline._penalties, runner.pipeline._adjustments[2]
        for slot, request in owners.items():
            assert penalties.presence[slot].item() == request.params.presence_penalty
            assert bias.value[slot].sum().item() == sum((request.params.logit_bias or {}).values())  # type: ignore[attr-defined]
        while len(engine.scheduler.running) > 1:
            engine.step()
