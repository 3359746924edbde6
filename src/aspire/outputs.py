"""RequestGroup: the n sequences of one user request, and their rendering as a RequestOutput."""

from collections.abc import Sequence
from dataclasses import dataclass

from aspire.request import CompletionOutput, Request, RequestCounters, RequestMetrics, RequestOutput
from aspire.text import OutputText


def metrics_of(counters: Sequence[RequestCounters]) -> RequestMetrics:
    """Sums over sequences; times run from the earliest arrival to the latest end."""
    total = RequestCounters()
    for one in counters:
        total.num_drafted += one.num_drafted
        total.num_accepted += one.num_accepted
        total.num_verifications += one.num_verifications
        total.num_preempted += one.num_preempted
        total.num_cached_tokens += one.num_cached_tokens
    arrival = min(one.arrival_time for one in counters)
    first = [one.first_token_time for one in counters if one.first_token_time is not None]
    scheduled = [one.first_scheduled_time for one in counters if one.first_scheduled_time is not None]
    ends = [one.finished_time for one in counters if one.finished_time is not None]
    return RequestMetrics(
        num_drafted=total.num_drafted, num_accepted=total.num_accepted, num_verifications=total.num_verifications,
        num_preempted=total.num_preempted, num_cached_tokens=total.num_cached_tokens,
        acceptance_rate=total.acceptance_rate, tokens_per_verification=total.tokens_per_verification,
        time_to_first_token=min(first) - arrival if first else None,
        latency=max(ends) - arrival if len(ends) == len(counters) else None,
        queue_time=min(scheduled) - arrival if scheduled else None,
    )


@dataclass(slots=True)
class RequestGroup:
    """`sequences[i]` is output i; `texts[i]` its text so far."""

    request_id: str
    prompt: str | None
    sequences: list[Request]
    texts: list[OutputText]

    @property
    def is_finished(self) -> bool:
        return all(request.is_finished for request in self.sequences)

    def render(self) -> RequestOutput:
        """The state as the user sees it; text and token ids are cumulative."""
        first = self.sequences[0]
        prompt_logprobs = first.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id, prompt=self.prompt, prompt_token_ids=tuple(first.prompt_token_ids),
            outputs=tuple(self._render_one(i) for i in range(len(self.sequences))), finished=self.is_finished,
            metrics=metrics_of([request.counters for request in self.sequences]),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        )

    def _render_one(self, index: int) -> CompletionOutput:
        request, text = self.sequences[index], self.texts[index]
        wants_logprobs = request.params.logprobs is not None
        return CompletionOutput(
            index=index, text=text.visible_text, token_ids=tuple(request.output_token_ids),
            cumulative_logprob=sum(entry.logprob for entry in request.logprobs) if wants_logprobs else None,
            logprobs=tuple(request.logprobs) if wants_logprobs else None,
            finish_reason=request.finish_reason.value if request.finish_reason else None,
            stop_reason=text.stop_reason, metrics=metrics_of([request.counters]),
        )
