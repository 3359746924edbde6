"""Log probabilities in the two shapes of OpenAI: parallel lists for completions, objects for chat."""

import math
from collections.abc import Sequence

from aspire.schedule.plan import TokenLogprobs
from aspire.server.token_text import TokenText

FLOOR = -9999.0  # JSON has no -inf; vLLM's choice


def finite(value: float) -> float:
    return value if math.isfinite(value) and value > FLOOR else FLOOR


def completion_logprobs(tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], count: int,
                        token_text: TokenText, offset: int) -> dict[str, object]:
    """The `logprobs` of a completions choice. offset: where the first token begins in the choice's text. An entry of
    None (the first token of a prompt) has no probability."""
    texts = [token_text.text(token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    values = [None if entry is None else finite(entry.logprob) for entry in entries]
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            tops.append(None)
            continue
        top = {token_text.text(token): finite(value) for token, value in reversed(entry.top[:count])}
        top = dict(reversed(top.items()))  # of tokens with one text, the likelier counts
        top.setdefault(token_text.text(entry.token_id), finite(entry.logprob))
        tops.append(top)
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(entries: Sequence[TokenLogprobs], count: int, token_text: TokenText) -> dict[str, object]:
    """The `logprobs` of a chat choice."""
    def one(token: int, value: float) -> dict[str, object]:
        raw = token_text.raw(token)
        return {"token": raw.decode(errors="replace"), "logprob": finite(value), "bytes": list(raw)}

    return {"content": [
        {**one(entry.token_id, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top[:count]]}
        for entry in entries], "refusal": None}
