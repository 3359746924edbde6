"""The judges: leading agreement under shared noise, and rejection sampling's emitted distribution."""

import math
import random

import pytest
import torch

from aspire.ops.judge.reference import judge, judge_rejection, leading_agreement
from aspire.ops.sample.reference import probabilities, sample
from aspire.ops.sample.rows import STREAM_DRAFT, SamplingRows
from aspire.schedule.plan import RowKind
from aspire.testing.step_cases import step_case, step_picks, step_verdicts


def make_rows(temperature: float, seed: torch.Tensor, position: torch.Tensor, stream: int = 0) -> SamplingRows:
    n = seed.numel()
    return SamplingRows(temperature=torch.full((n,), temperature), top_k=torch.zeros(n, dtype=torch.int32),
                        top_p=torch.ones(n), min_p=torch.zeros(n), seed=seed, position=position, mode="plain",
                        stream=stream)


def test_the_leading_run_is_counted() -> None:
    """Against a loop, on random rows with stale entries past num_drafted that happen to agree.

    Fails when num_drafted is ignored, or when agreements after the first miss count."""
    rng = random.Random(0)
    picks = torch.tensor([[rng.randrange(2) for _ in range(6)] for _ in range(300)])
    drafts = torch.tensor([[rng.randrange(2) for _ in range(5)] for _ in range(300)])
    num_drafted = torch.tensor([rng.randrange(6) for _ in range(300)], dtype=torch.int32)
    accepted = leading_agreement(picks, drafts, num_drafted)
    assert accepted.dtype == torch.int32
    for row in range(300):
        expected = 0
        while expected < num_drafted[row] and picks[row, expected] == drafts[row, expected]:
            expected += 1
        assert int(accepted[row]) == expected
    assert leading_agreement(picks[:3, :1], drafts[:3, :0], torch.zeros(3, dtype=torch.int32)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", range(40))
def test_a_step_is_judged_row_by_row(seed: int) -> None:
    """Planted faults: drafts taken from the table of the row's number instead of its slot; a drafting row that accepts
    what it drafted before; the margin converted to an integer; NaN looked for in the first pick alone."""
    case = step_case(seed)
    picks = step_picks(case, seed)
    verdicts = judge(picks, case.inputs, case.tables.tokens)
    margins = verdicts[:, -1].view(torch.float32)
    place = 0
    for index, row in enumerate(case.plan.rows):
        count = 0 if not row.samples else 1 if row.tokens else row.num_tokens
        own = slice(place, place + count)
        place += count
        accepted = 0
        if row.kind is RowKind.FULL and not row.tokens:
            drafts = case.tables.tokens[row.slot, 1:]
            while accepted < row.num_drafted and picks.token[own][accepted] == drafts[accepted]:
                accepted += 1
        assert verdicts[index, -2] == accepted
        assert verdicts[index, :count].tolist() == picks.token[own].tolist()
        if count and picks.margin[own].isnan().any():
            assert margins[index].isnan()
        elif count:
            assert margins[index] == picks.margin[own][0]


def test_the_random_steps_accept_runs_of_every_length() -> None:
    """Fails when the picks of the cases are those of another slot's drafts."""
    accepted = [count for seed in range(40) for count in step_verdicts(step_case(seed), seed)[:, -2].tolist()]
    assert set(range(6)) <= set(accepted)


def emitted(temperature: float, n: int, draft_stream: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """n rounds of 2 drafts with independent logits per position; (tokens [n, 3], num_accepted [n], target [3, 5])."""
    target = torch.tensor([[1.0, 0.2, -1.0, 0.0, 2.0], [0.0, 1.5, 0.3, -2.0, 0.4], [0.5, 0.1, 1.2, 0.0, -1.0]])
    draft = torch.tensor([[0.0, 1.2, -0.5, 0.3, 1.0], [1.0, 0.5, 0.0, -1.0, 0.9]])
    seed = torch.arange(n).repeat_interleave(3)
    position = (torch.arange(3) + 11).repeat(n)
    keep = position < 13
    draft_rows = make_rows(temperature, seed[keep], position[keep], draft_stream)
    draft_logits = draft.repeat(n, 1)
    drafts = sample(draft_logits, draft_rows).token.view(n, 2)
    draft_probs = probabilities(draft_logits, draft_rows).view(n, 2, 5)
    verdict = judge_rejection(target.expand(n, 3, 5), make_rows(temperature, seed, position), drafts, draft_probs,
                              torch.full((n,), 2, dtype=torch.int32))
    return verdict.tokens, verdict.num_accepted, target


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=probs.numel()).double()
    expected = probs.double() * tokens.numel()
    return float(((counts - expected) ** 2 / expected).sum())


BOUND = 4 + 2 * math.sqrt(4 * math.log(1e6)) + 2 * math.log(1e6)  # df 4, x = ln 1e6: Laurent and Massart 2000, lemma 1


def test_rejection_emits_the_target_distribution() -> None:
    """Chi-square of every emitted position given it was reached, 40,000 rounds: false-alarm probability below 3e-6.

    Fails when the residual is not clamped, when the accept test is inverted, or when drafts use STREAM_RESIDUAL."""
    tokens, accepted, target = emitted(0.9, 40_000, STREAM_DRAFT)
    probs = torch.softmax(target / 0.9, dim=1)
    for column in range(3):
        reached = accepted >= column
        assert chi_square(tokens[reached, column], probs[column]) < BOUND, column
    # Acceptance of the first draft is 1 - TV; 5 standard deviations: false alarm below 6e-7.
    draft = torch.softmax(torch.tensor([0.0, 1.2, -0.5, 0.3, 1.0]) / 0.9, dim=0)
    rate = float(torch.minimum(draft, probs[0]).sum())
    assert abs(float((accepted >= 1).float().mean()) - rate) < 5 * math.sqrt(rate * (1 - rate) / 40_000)


def test_a_shared_stream_would_bias_rejection() -> None:
    """The reason for separate streams, and proof that the statistic above can fail: drafts drawn from the residual's
    stream give a chi-square (78) beyond the bound (46.5)."""
    tokens, accepted, target = emitted(0.9, 40_000, 3)
    probs = torch.softmax(target / 0.9, dim=1)
    assert max(chi_square(tokens[accepted >= c, c], probs[c]) for c in range(3)) > BOUND


def test_rejection_without_drafts_is_plain_sampling() -> None:
    """A row with no drafts, and the bonus token, equal `sample`; greedy emits the target's argmax run."""
    logits = torch.randn(6, 4, 9, generator=torch.Generator().manual_seed(2))
    seed = torch.arange(6).repeat_interleave(4)
    position = torch.arange(24)
    rows = make_rows(1.0, seed, position)
    picks = sample(logits.view(24, 9), rows).token.view(6, 4)
    drafts = torch.zeros(6, 3, dtype=torch.int64)
    none = judge_rejection(logits, rows, drafts, torch.full((6, 3, 9), 1 / 9), torch.zeros(6, dtype=torch.int32))
    assert torch.equal(none.tokens[:, 0], picks[:, 0])
    assert none.num_accepted.tolist() == [0] * 6

    greedy = make_rows(0.0, seed, position)
    best = logits.argmax(dim=2)
    drafts = best[:, :3].clone()
    drafts[1, 1] = (drafts[1, 1] + 1) % 9
    one_hot = torch.nn.functional.one_hot(drafts, 9).float()
    verdict = judge_rejection(logits, greedy, drafts, one_hot, torch.tensor([3, 3, 2, 1, 3, 0], dtype=torch.int32))
    assert verdict.num_accepted.tolist() == [3, 1, 2, 1, 3, 0]
    for row, length in enumerate(verdict.num_accepted.tolist()):
        assert verdict.tokens[row, : length + 1].tolist() == best[row, : length + 1].tolist()
