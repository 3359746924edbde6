"""The logits pipeline against a plain Python model, and draft against target."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from aspire.request import Request, SamplingParams, StructuredOutputs
from aspire.sampling.bad_words import bad_word_ids
from aspire.sampling.pipeline import LogitsPipeline
from aspire.sampling.rows import PickRows

VOCAB, LIMIT, EOS = 40, 5, (38, 39)


class WordTokenizer:
    """Ids: letters a..z are 0..25, a space before a letter adds 0 tokens but shifts its first letter by 0 or 26 - see
    encode; enough to give bad words of one, two and three tokens."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        ids = [ord(char) - ord("a") for char in text.lstrip()]
        if text.startswith(" ") and ids and ids[0] < 10:
            ids[0] += 26  # " a".." j" are tokens of their own
        elif text.startswith(" "):
            ids.insert(0, 37)  # a lone space
        return ids


def make_pipeline(num_slots: int = 6) -> LogitsPipeline:
    return LogitsPipeline(num_slots, VOCAB, eos_token_ids=EOS, tokenizer=WordTokenizer(), device=torch.device("cpu"))


def make_request(index: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()) -> Request:
    request = Request(str(index), prompt, params, max_total=1000)
    request.output_token_ids.extend(output)
    return request


MENU = [
    {}, {"presence_penalty": 1.25}, {"frequency_penalty": -0.75}, {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.5},
    {"logit_bias": {3: 5.0, 20: -100.0, 0: 0.25}}, {"logit_bias": {7: 2.0}},
    {"min_tokens": 4, "stop_token_ids": [1, 2, 5]},
    {"bad_words": ["c"]}, {"bad_words": ["ab", "xyz", "q"]}, {"bad_words": ["ba"], "min_tokens": 6},
    {"bad_words": ["aaa"], "logit_bias": {1: 1.0}, "frequency_penalty": 1.0, "min_tokens": 3,
     "repetition_penalty": 1.1},
]


def adjusted_by_hand(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """What vLLM documents, as loops over one row. `output` holds the drafts before the row too."""
    values = list(logits)
    for run in bad_word_ids(WordTokenizer(), params.bad_words):
        if len(run) == 1 or (len(output) >= len(run) - 1 and tuple(output[len(output) - len(run) + 1 :]) == run[:-1]):
            values[run[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in (*EOS, *params.stop_token_ids):
            values[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for token in set(prompt) | set(output):
        values[token] = values[token] / params.repetition_penalty if values[token] > 0 else \
            values[token] * params.repetition_penalty
    for token in set(output):
        values[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return values


def history(rng: random.Random, length: int) -> list[int]:
    return [rng.choice([0, 0, 1, 1, 26, 27, rng.randrange(VOCAB)]) for _ in range(length)]


def apply_row(pipeline: LogitsPipeline, logits: torch.Tensor, slot: int, position: int, drafts: Sequence[int],
              num_before: int) -> torch.Tensor:
    table = torch.randint(0, VOCAB, (7, LIMIT))  # other slots' and stale drafts are arbitrary
    table[slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
    rows = PickRows(torch.tensor([slot]), torch.tensor([position]), torch.tensor([num_before]), table)
    return pipeline.apply(logits.unsqueeze(0), rows, [slot])[0]


def test_matches_a_plain_model_over_rounds() -> None:
    """Random requests come and go in slots; each round drafts, verifies a random prefix and commits. Every draft row
    and every row of every verification is compared with the loops above, and the two with each other, bit for bit.

    Fails when drafts before a row are not counted, when commit forgets the bonus token, when a reused slot keeps
    counts, when repetition ignores the prompt, when stale drafts past num_before count."""
    rng = random.Random(1)
    torch.manual_seed(1)
    pipeline = make_pipeline()
    owner: dict[int, tuple[Request, list[int]]] = {}
    for step in range(250):
        slot = rng.randrange(6)
        if slot not in owner or rng.random() < 0.1:
            params = SamplingParams(max_tokens=None, **MENU[step % len(MENU)])  # type: ignore[arg-type]
            output = history(rng, rng.randrange(4)) if rng.random() < 0.5 else []
            request = make_request(step, params, history(rng, rng.randrange(1, 9)), output)
            pipeline.admit(slot, request)
            owner[slot] = (request, list(output))
        request, output = owner[slot]
        drafts = history(rng, rng.randrange(LIMIT + 1))
        known = request.num_prompt + len(output)
        logits = torch.randn(len(drafts) + 1, VOCAB) * 3
        table = torch.randint(0, VOCAB, (7, LIMIT))
        table[slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        count = len(drafts) + 1
        rows = PickRows(torch.full((count,), slot), known + torch.arange(count), torch.arange(count), table)
        verified = pipeline.apply(logits, rows, [slot])
        for index in range(count):
            drafted = apply_row(pipeline, logits[index], slot, known + index, drafts[:index], index)
            assert torch.equal(drafted, verified[index])
            expected = adjusted_by_hand(logits[index].tolist(), request.params, request.prompt_token_ids,
                                        output + drafts[:index])
            assert torch.allclose(verified[index], torch.tensor(expected), atol=1e-5, rtol=1e-5)
        emitted = drafts[: rng.randrange(count)] + [rng.randrange(VOCAB)]
        tokens = torch.randint(0, VOCAB, (2, LIMIT + 1))
        tokens[0, : len(emitted)] = torch.tensor(emitted)
        pipeline.commit(torch.tensor([slot, 6]), tokens, torch.tensor([len(emitted), 0]), [slot])
        output += emitted


def test_rows_do_not_touch_each_other() -> None:
    """A mixed batch gives each row the bits it has alone; rows without adjustments keep the model's bits, and the
    argument stays as it was.

    Fails when a neutral penalty rounds, or when the scatter of one row's bias spills over."""
    rng = random.Random(2)
    pipeline = make_pipeline(len(MENU))
    for slot, options in enumerate(MENU):
        pipeline.admit(slot, make_request(slot, SamplingParams(max_tokens=None, **options), history(rng, 5),
                                          history(rng, 3)))  # type: ignore[arg-type]
    n = len(MENU)
    logits = torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    before = logits.clone()
    drafts = torch.randint(0, VOCAB, (n + 1, LIMIT), generator=torch.Generator().manual_seed(4))
    num_before = torch.arange(n) % (LIMIT + 1)
    rows = PickRows(torch.arange(n), 8 + num_before, num_before, drafts)
    together = pipeline.apply(logits, rows, list(range(n)))
    assert torch.equal(logits, before)
    assert torch.equal(together[0], logits[0])
    for i in range(n):
        one = PickRows(rows.slot[i : i + 1], rows.position[i : i + 1], rows.num_before[i : i + 1], drafts)
        assert torch.equal(pipeline.apply(logits[i : i + 1], one, [i])[0], together[i])
    assert not pipeline.needed([0])
    assert pipeline.needed([0, 1])


def test_grammar_mask_comes_first_and_wins_over_min_tokens() -> None:
    """Fails when the mask is laid out with the highest id in the lowest bit, or when min_tokens bans the only token
    that the grammar allows."""
    pipeline = make_pipeline()
    params = SamplingParams(min_tokens=5, structured_outputs=StructuredOutputs(regex="x"), logit_bias={4: 50.0})
    pipeline.admit(0, make_request(0, params, [1]))
    mask = torch.tensor([[1 << 4, 1 << (38 - 32)], [-1, -1]], dtype=torch.int32)
    rows = PickRows(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([0, 1]), torch.zeros(7, LIMIT).long())
    out = pipeline.apply(torch.zeros(2, VOCAB), rows, [0], mask)
    assert out[0].isfinite().nonzero().flatten().tolist() == [4, 38]
    assert out[0, 4] == 50.0
    assert out[1].isfinite().all()


def test_bad_word_ids_follow_vllm() -> None:
    tokenizer = WordTokenizer()
    assert bad_word_ids(tokenizer, ["ab"]) == ((0, 1), (26, 1))  # " ab" begins with another token
    assert bad_word_ids(tokenizer, ["xy"]) == ((23, 24),)  # " xy" is a lone space and the same tokens: covered
    assert bad_word_ids(tokenizer, []) == ()
    with pytest.raises(ValueError, match="bad_words"):
        bad_word_ids(None, ["x"])


def test_bad_words_do_not_begin_in_the_prompt() -> None:
    """Fails when the history starts with the prompt's last tokens."""
    pipeline = make_pipeline()
    pipeline.admit(1, make_request(0, SamplingParams(bad_words=["ab"]), [5, 0]))
    rows = PickRows(torch.tensor([1]), torch.tensor([2]), torch.tensor([0]), torch.zeros(7, LIMIT, dtype=torch.int64))
    assert pipeline.apply(torch.zeros(1, VOCAB), rows, [1]).isfinite().all()


def test_plain_decoding_has_no_drafts() -> None:
    """A draft limit of 0: the table of drafts has no columns."""
    pipeline = make_pipeline()
    params = SamplingParams(frequency_penalty=1.0, bad_words=["ab"])
    pipeline.admit(2, make_request(0, params, [5], [0]))
    rows = PickRows(torch.tensor([2]), torch.tensor([2]), torch.tensor([0]), torch.zeros(7, 0, dtype=torch.int64))
    out = pipeline.apply(torch.zeros(1, VOCAB), rows, [2])
    assert out[0, 0] == -1.0
    assert out[0, 1] == -math.inf
    pipeline.commit(torch.tensor([2]), torch.tensor([[7]]), torch.tensor([1]), [2])
    assert pipeline.apply(torch.zeros(1, VOCAB), rows, [2])[0, 1] == 0.0
