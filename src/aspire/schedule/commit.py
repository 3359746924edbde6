"""Walk a verdict's tokens into a request one by one, so that stops, counts and logprobs see what plain decoding shows.

The scheduler's own books (blocks, slots, drafts) are not touched here.
"""

from aspire.request import FinishReason, Request
from aspire.schedule.plan import Row, RowKind, Verdict


def max_emitted(row: Row) -> int:
    """The most tokens a row can emit: all its drafts and the bonus token."""
    if not (row.samples and row.emits):
        return 0
    return row.num_drafted + 1 if row.kind is RowKind.FULL else 1


def check_verdict(row: Row, verdict: Verdict) -> None:
    """AssertionError unless the verdict can be the row's."""
    assert verdict.request_id == row.request_id, f"verdict of {verdict.request_id!r} for a row of {row.request_id!r}"
    most = max_emitted(row)
    assert min(most, 1) <= len(verdict.tokens) <= most, f"{len(verdict.tokens)} tokens, at most {most} possible"
    if row.kind is RowKind.FULL:
        assert verdict.num_drafted == row.num_drafted, f"verified {verdict.num_drafted} of {row.num_drafted} drafts"


def append_tokens(request: Request, verdict: Verdict, now: float) -> int:
    """Append the verdict's tokens until one ends the request; sets `finish_reason` then. Returns how many were kept."""
    tokens, logprobs, checker = verdict.tokens, verdict.logprobs, request.stop_checker
    output, num_output = request.output_token_ids, len(request.output_token_ids)
    most = request.max_total - request.num_prompt
    for index, token in enumerate(tokens):
        output.append(token)
        num_output += 1
        if logprobs is not None:
            request.logprobs.append(logprobs[index])
        reason = None if checker is None else checker.check(token, num_output)
        if reason is None and num_output >= most:
            reason = FinishReason.LENGTH
        if reason is not None:
            request.finish_reason = reason
            return _count(request, index + 1, now)
    return _count(request, len(tokens), now)


def count_verification(request: Request, verdict: Verdict, num_kept: int) -> None:
    """Of the accepted drafts only the kept ones count: the last kept token stands for the bonus token."""
    counters = request.counters
    counters.num_verifications += 1
    counters.num_drafted += verdict.num_drafted
    counters.num_accepted += num_kept - 1


def append_prompt_logprobs(request: Request, verdict: Verdict) -> None:
    """Prefill chunks bring the prompt's logprobs in order of position; a recomputed prompt adds nothing."""
    if verdict.prompt_logprobs is None:
        return
    if request.prompt_logprobs is None:
        request.prompt_logprobs = []
    missing = request.num_prompt - len(request.prompt_logprobs)
    request.prompt_logprobs.extend(verdict.prompt_logprobs[:missing])


def _count(request: Request, num_kept: int, now: float) -> int:
    counters = request.counters
    counters.num_emitted += num_kept
    if num_kept and counters.first_token_time is None:
        counters.first_token_time = now
    if request.is_finished:
        counters.finished_time = now
    return num_kept
