"""Rules that choose lists, end to end: merging with verified scores, and budgets by coverage of the mass."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from aspire.bench.acceptance import Lab, Work
from aspire.bench.selections import VARIANTS
from aspire.build import Loaded, load
from aspire.config import EngineConfig
from aspire.engine import Engine
from aspire.request import SamplingParams
from aspire.runtime.cache import Selection
from aspire.speculation.layers import per_layer_lists
from aspire.speculation.policy import Overrides
from aspire.speculation.selection import SelectionConfig
from aspire.testing.models import tiny_model

SMALL = Overrides(budget=40, window=8, sinks=0, refresh=(1, 3))
CONTEXTS = tuple(tuple((7 * i * i + 13 * i + 31 * row) % 256 for i in range(length))
                 for row, length in enumerate((120, 95, 107)))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    path = tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=5)
    loaded: Loaded = load(EngineConfig.from_options(str(path), {}))
    lab = Lab(loaded, Work(CONTEXTS, 5, 30), {"block_size": 8})
    lab.prefill()
    return lab


def engine_of(lab: Lab, **changes: Any) -> Engine:
    return lab.engine(lab.policy(VARIANTS["aspire"], replace(SMALL, **changes)))


def decode(engine: Engine, *, rounds: int) -> tuple[list[tuple[int, ...]], list[list[Tensor]]]:
    """Tokens, and the units of all lists after each drafting step, by round."""
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=60, ignore_eos=True)
    for index, context in enumerate(CONTEXTS):
        engine.add(f"d{index}", context, params)
    store: Selection = engine.loop.runner.setup.selection  # type: ignore[attr-defined]
    seen: list[list[Tensor]] = [[]]
    while len(seen) <= rounds:
        engine.advance()
        last = engine.totals._last
        assert last is not None
        kinds = {row.kind for row in last.rows}
        if kinds == {"draft"}:
            seen[-1].append(torch.where(torch.arange(store.capacity) < store.num_units[..., None], store.units, -1))
        elif kinds == {"verify"}:
            seen.append([])
    tokens = [tuple(engine.output(f"d{index}").outputs[0].token_ids) for index in range(3)]
    for index in range(3):
        engine.abort(f"d{index}")
    return tokens, seen[:rounds]


def test_no_weight_is_replacement_and_all_weight_keeps_the_verified_list(lab: Lab) -> None:
    """The renewed lists (0: below the first refresh layer). Planted faults: kept scores of another layer; the
    verification's rows added to themselves; fresh scores kept."""
    _, replaced = decode(engine_of(lab), rounds=3)
    _, none = decode(engine_of(lab, merge="mix", mix=0.0), rounds=3)
    _, half = decode(engine_of(lab, merge="mix", mix=0.5), rounds=3)
    _, every = decode(engine_of(lab, merge="mix", mix=1e12), rounds=3)

    def flat(rounds: list[list[Tensor]]) -> list[Tensor]:
        return [units[1:, :3] for one in rounds for units in one]

    assert all(torch.equal(one, other) for one, other in zip(flat(replaced), flat(none), strict=True))
    assert any(not torch.equal(one[1:, :3], one_round[0][1:, :3]) for one_round in replaced for one in one_round)
    for one_round in every:
        assert all(torch.equal(one[1:, :3], one_round[0][1:, :3]) for one in one_round)
    assert not torch.equal(every[0][0][1:, :3], every[1][0][1:, :3])
    assert not torch.equal(every[0][0][1, :3], every[0][0][2, :3])
    assert any(not torch.equal(one, other) for one, other in zip(flat(half), flat(replaced), strict=False))
    assert any(not torch.equal(one, other) for one, other in zip(flat(half), flat(every), strict=False))


@pytest.mark.parametrize("between", ["group", "layer"])
def test_lists_change_at_the_drafts_that_renew_and_at_no_other(lab: Lab, between: str) -> None:
    """Lists of layers 0, then 1 and 2, then 3 and 4; 5 drafts a round, renewed at the third. A verification chooses
    all of them; with lists of their own layers 1 and 2 differ until the renewal makes them one.

    Planted faults: the draft after the third renewed; the verification's choice not stored in refresh layers.
    """
    engine = engine_of(lab, refresh_every=3, between=between)
    plan = engine.loop.runner.setup.layers  # type: ignore[attr-defined]
    _, rounds = decode(engine, rounds=3)
    renewed = sorted({index for lists in plan.draft_writes for index in lists})
    groups = [lists for lists in plan.draft_writes if lists]
    changed = [0] * 3
    for steps in rounds:
        assert len(steps) == 5
        for row in range(3):
            first, second, third, fourth, fifth = [step[renewed, row] for step in steps]
            assert torch.equal(first, second)
            assert torch.equal(third, fourth)
            assert torch.equal(third, fifth)
            changed[row] += not torch.equal(second, third)
            if between == "layer":
                assert all(not torch.equal(steps[0][one, row], steps[0][other, row]) for one, other in groups)
                assert all(torch.equal(steps[2][one, row], steps[2][other, row]) for one, other in groups)
    assert min(changed) > 0
    for before, after in pairwise(rounds):
        assert not torch.equal(before[-1][renewed, :3], after[0][renewed, :3])


def test_refresh_layers_read_lists_between_renewals(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backend is asked for: refresh layers 1 and 3 get a list, and rows are sparse there unless the draft
    renews. Planted fault: `rests` set for the third draft as well."""
    engine = engine_of(lab, refresh_every=3)
    setup = engine.loop.runner.setup  # type: ignore[attr-defined]
    attend, seen = setup.backend.attend, []

    def watch(query: Tensor, key: Tensor, value: Tensor, rows: Any, selection: Any, options: Any, probe: Any) -> Any:
        probed = 0 if probe is None else int((probe.token >= 0).any(1).sum())
        seen.append((bool(rows.sparse.all()), selection is not None, probed))
        return attend(query, key, value, rows, selection, options, probe)

    monkeypatch.setattr(type(setup.backend), "attend", lambda self, *given: watch(*given))
    decode(engine, rounds=2)
    steps = [seen[first:first + 5] for first in range(0, len(seen), 5)]
    drafts = [step for step in steps if step[0][0]]
    assert len(drafts) >= 10
    for number, step in enumerate(drafts, 1):
        whole = number % 5 == 3  # of a round of 5
        for layer, (sparse, has_list, probed) in enumerate(step):
            assert has_list
            assert sparse == (layer not in (1, 3) or not whole)
            assert probed == (3 if layer in (1, 3) and whole else 0)


def test_kept_scores_belong_to_slot_and_layer() -> None:
    """By hand: two renewing layers, three slots. Planted fault: the scratch slot's scores read for a drafting row."""
    store = Selection(per_layer_lists(5, (1, 3)), SelectionConfig(merge="mix", mix=2.0), num_slots=3,
                      max_model_len=6, block_size=16, device=torch.device("cpu"))
    verified = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    store.mix(1, torch.tensor([2, 0]), verified.clone(), 2)
    scores = torch.tensor([[9.0] * 3, [0.5] * 3, [0.25] * 3])
    store.mix(1, torch.tensor([1, 0, 2]), scores, 1)
    assert scores.tolist() == [[9.0] * 3, [8.5, 10.5, 12.5], [2.25, 4.25, 6.25]]
    assert store.verified[0].abs().sum() == 0
    assert store.verified[1, 1].tolist() == [9.0] * 3 + [0.0] * 3


@pytest.mark.parametrize("changes", [{"merge": "mix"}, {"merge": "mix", "unit": 8}, {"coverage": 0.5}],
                         ids=["mix", "mix-unit8", "coverage"])
def test_tokens_stay_those_of_plain_decoding(lab: Lab, changes: dict[str, Any]) -> None:
    """Planted fault: draft rows of a mixed step scored as verifying ones."""
    plain, _ = decode(lab.engine(lab.policy(VARIANTS["full"])), rounds=4)
    tokens, _ = decode(engine_of(lab, **changes), rounds=8)
    for one, other in zip(plain, tokens, strict=True):
        shared = min(len(one), len(other))
        assert shared > 8
        assert one[:shared] == other[:shared]


def test_coverage_takes_fewer_units_where_the_mass_is_dense(lab: Lab) -> None:
    """Lists differ in length by layer and request, none exceeds the quota, and more coverage takes more. Planted
    fault: one count for all lists of a step."""
    def lengths(coverage: float | None) -> Tensor:
        engine = engine_of(lab, coverage=coverage)
        decode(engine, rounds=2)
        store: Selection = engine.loop.runner.setup.selection  # type: ignore[attr-defined]
        return store.num_units[:, :3].clone()

    some, more, every = lengths(0.2), lengths(0.6), lengths(None)
    assert (every == 32).all()
    assert (some <= more).all()
    assert (more <= every).all()
    assert (some < every).all()
    assert len(set(some.flatten().tolist())) > 2
