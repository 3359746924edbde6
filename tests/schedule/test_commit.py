"""The walk over a verdict's tokens."""

import pytest

from aspire.request import FinishReason, Request, SamplingParams
from aspire.schedule.commit import append_prompt_logprobs, append_tokens, check_verdict, count_verification, max_emitted
from aspire.schedule.plan import Row, RowKind, TokenLogprobs, Verdict


class StopAt:
    """Stops at one token; records what it was shown."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[tuple[int, int]] = []

    def check(self, token_id: int, num_output: int) -> FinishReason | None:
        self.seen.append((token_id, num_output))
        return FinishReason.STOP if token_id == self.token else None


def make_request(max_total: int, stop: int = -1) -> tuple[Request, StopAt]:
    checker = StopAt(stop)
    return Request("a", [1, 2, 3], SamplingParams(), max_total=max_total, stop_checker=checker), checker


def test_nothing_after_a_stop_survives() -> None:
    """Planted fault: the walk goes on after a stop, as `output += verdict.tokens` would."""
    request, checker = make_request(max_total=20, stop=11)
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in (10, 11, 12, 13))
    verdict = Verdict("a", (10, 11, 12, 13), num_drafted=5, logprobs=logprobs)
    num_kept = append_tokens(request, verdict, now=7.0)
    count_verification(request, verdict, num_kept)
    assert (num_kept, request.finish_reason, request.output_token_ids) == (2, FinishReason.STOP, [10, 11])
    assert [entry.token_id for entry in request.logprobs] == [10, 11]
    assert checker.seen == [(10, 1), (11, 2)]
    counters = request.counters
    assert (counters.num_emitted, counters.num_accepted, counters.num_drafted) == (2, 1, 5)
    assert counters.tokens_per_verification == 2.0
    assert (counters.first_token_time, counters.finished_time) == (7.0, 7.0)


def test_length_ends_a_request_and_a_stop_wins_over_it() -> None:
    """Planted fault: LENGTH is checked before the stop checker, so a stop on the last token is lost."""
    request, _ = make_request(max_total=5)
    assert append_tokens(request, Verdict("a", (10, 11, 12)), now=1.0) == 2
    assert (request.finish_reason, request.output_token_ids) == (FinishReason.LENGTH, [10, 11])
    request, _ = make_request(max_total=5, stop=11)
    append_tokens(request, Verdict("a", (10, 11)), now=1.0)
    assert request.finish_reason is FinishReason.STOP


def test_first_token_time_is_that_of_the_first_token() -> None:
    """Planted fault: set at every commit."""
    request, _ = make_request(max_total=9)
    append_tokens(request, Verdict("a"), now=1.0)
    assert request.counters.first_token_time is None
    append_tokens(request, Verdict("a", (5,)), now=2.0)
    append_tokens(request, Verdict("a", (6,)), now=3.0)
    assert (request.counters.first_token_time, request.counters.finished_time) == (2.0, None)


def test_prompt_logprobs_of_a_recomputed_prompt_add_nothing() -> None:
    """Planted fault: chunks are appended without regard to what is there."""
    request, _ = make_request(max_total=9)
    second, third = TokenLogprobs(2, -0.5), TokenLogprobs(3, -0.25)
    append_prompt_logprobs(request, Verdict("a"))
    assert request.prompt_logprobs is None
    append_prompt_logprobs(request, Verdict("a", prompt_logprobs=(None, second)))
    append_prompt_logprobs(request, Verdict("a", prompt_logprobs=(third,)))
    append_prompt_logprobs(request, Verdict("a", prompt_logprobs=(None, second, third)))
    assert request.prompt_logprobs == [None, second, third]


VERIFICATION = Row("a", 0, RowKind.FULL, 5, 3, 2, samples=True)
DRAFT = Row("a", 0, RowKind.SPARSE, 5, 1, 0, samples=True, emits=False)
CHUNK = Row("a", 0, RowKind.FULL, 0, 3, 0, samples=False, tokens=(1, 2, 3), emits=False)
LOSSY = Row("a", 0, RowKind.SPARSE, 5, 1, 0, samples=True)


def test_max_emitted() -> None:
    """Planted fault: drafting rows count as emitting one."""
    assert [max_emitted(row) for row in (VERIFICATION, DRAFT, CHUNK, LOSSY)] == [3, 0, 0, 1]


@pytest.mark.parametrize(("row", "verdict"), [
    (VERIFICATION, Verdict("b", (1,), 2)),
    (VERIFICATION, Verdict("a", (), 2)),
    (VERIFICATION, Verdict("a", (1, 2, 3, 4), 2)),
    (VERIFICATION, Verdict("a", (1,), 1)),
    (DRAFT, Verdict("a", (1,))),
    (CHUNK, Verdict("a", (1,))),
    (LOSSY, Verdict("a")),
], ids=["name", "none", "too-many", "drafts", "draft-emits", "chunk-emits", "lossy-silent"])
def test_a_verdict_that_cannot_be_the_rows_is_refused(row: Row, verdict: Verdict) -> None:
    """Planted fault: check_verdict without one of its asserts."""
    with pytest.raises(AssertionError):
        check_verdict(row, verdict)
