"""Incremental detokenisation and stops, on real (tiny) byte-level and byte-fallback tokenizers and a byte tokenizer."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from aspire.request import FinishReason, SamplingParams
from aspire.text import IncrementalDetokenizer, OutputText, TokenDecoder

CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café déjà vu 你好世界 こんにちは", "x = {'a': 1}\n\n",
          "👩‍👩‍👧 🇩🇪 😀"]


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<|end|>", "<|im|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>",
                                   additional_special_tokens=["<|im|>"])


def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama-2 style: spaces as U+2581, unknown characters as bytes, the first space of a text dropped."""
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in "▁ abcdefghijklmnopqrstuvwxyz":
        vocab.setdefault(piece, len(vocab))
    merges = []
    for left, right in (("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("e", "r")):
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


class ByteTokenizer:
    """Not a transformers class: ids are bytes."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


@pytest.mark.parametrize("name", list(TOKENIZERS))
@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet="abc the\n 你é😀👩‍👧", max_size=60), prompt=st.text(alphabet="ab é你", max_size=12))
def test_pieces_add_up_to_the_text(name: str, text: str, prompt: str) -> None:
    """Prompt plus pieces equal the decoded whole, and no piece holds a replacement character.

    Fails when each token is decoded alone, when the prompt's tokens are not used as context, or when pieces are given
    out while the text ends in U+FFFD."""
    tokenizer = TOKENIZERS[name]
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tokenizer.encode(prompt + text, add_special_tokens=False)[len(prompt_ids) :]
    detokenizer = IncrementalDetokenizer(TokenDecoder(tokenizer), prompt_ids)
    pieces = [detokenizer.append(token) for token in ids]
    before = tokenizer.decode(prompt_ids)
    expected = tokenizer.decode(prompt_ids + ids)
    if "\ufffd" in before:  # the prompt's end cut a character: the output shows it once complete
        before = before.rstrip("\ufffd")
    pieces.append(detokenizer.flush())
    assert before + "".join(pieces) == expected
    if "\ufffd" not in expected:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 329), max_size=60), skip=st.booleans())
def test_any_ids_add_up(ids: list[int], skip: bool) -> None:
    """Random ids, broken UTF-8 and special tokens included, byte-level: the pieces are the decoded whole.

    Fails when a skipped special token resets the window, or when what is open at the end is dropped."""
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(TokenDecoder(tokenizer), skip_special_tokens=skip)
    text = "".join(detokenizer.append(token) for token in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 290), max_size=200))
def test_byte_fallback_survives_garbage(ids: list[int]) -> None:
    """No exception, no lost letters; the window stays bounded."""
    detokenizer = IncrementalDetokenizer(TokenDecoder(TOKENIZERS["byte_fallback"]))
    text = "".join(detokenizer.append(token) for token in ids) + detokenizer.flush()
    letters = "".join(TOKENIZERS["byte_fallback"].convert_ids_to_tokens(i) for i in ids if i >= 261)
    assert [c for c in text if c in "xyz"] or not any(c in "xyz" for c in letters)
    assert len(detokenizer._window) <= 131


def test_a_prompt_that_ends_inside_a_character() -> None:
    """The output shows the character that it completes, but not the prompt's broken bytes.

    Fails when the prompt's replacement characters count as given out (the emoji is lost), or as not (they show)."""
    def output(prompt: bytes, tokens: bytes) -> list[str]:
        detokenizer = IncrementalDetokenizer(TokenDecoder(ByteTokenizer()), list(prompt))
        return [detokenizer.append(byte) for byte in tokens] + [detokenizer.flush()]

    emoji = "😀".encode()
    assert output(b"ab" + emoji[:2], emoji[2:] + b"c") == ["", "😀", "c", ""]
    assert output(b"ab" + emoji[:2], b"cd") == ["c", "d", ""]
    assert output(b"ab\xff", b"c\xff") == ["c", "", "\ufffd"]


def test_a_character_waits_for_its_last_byte() -> None:
    detokenizer = IncrementalDetokenizer(TokenDecoder(ByteTokenizer()))
    assert [detokenizer.append(byte) for byte in "a😀é".encode()] == ["a", "", "", "", "😀", "", "é"]
    assert [detokenizer.append(0xE4), detokenizer.append(0xBD), detokenizer.flush(), detokenizer.flush()] == \
        ["", "", "\ufffd", ""]


def test_cost_per_token_is_constant() -> None:
    """8 times the tokens take less than 24 times the time, endless broken bytes and hidden tokens included.

    Fails when the window is never cut (quadratic)."""
    def seconds(ids: list[int]) -> float:
        detokenizer = IncrementalDetokenizer(TokenDecoder(TOKENIZERS["byte_level"]))
        start = time.perf_counter()
        for token in ids:
            detokenizer.append(token)
        return time.perf_counter() - start

    broken = TOKENIZERS["byte_level"].convert_tokens_to_ids("Ã")  # a byte that opens a character, again and again
    for ids in ([broken], [0, 1], [40, 41, 42]):
        seconds(ids * 100)
        assert seconds(ids * 4000) < 24 * max(seconds(ids * 500), 1e-3)


def run(output: str, *, eos: tuple[int, ...] = (0,), **params: object) -> OutputText:
    """Feed the output's bytes until something stops."""
    text = OutputText(SamplingParams(max_tokens=None, **params), eos_token_ids=eos,  # type: ignore[arg-type]
                      decoder=TokenDecoder(ByteTokenizer()))
    for index, byte in enumerate(output.encode()):
        if text.check(byte, index + 1) is not None:
            break
    return text


def test_stop_string_across_tokens() -> None:
    """The text ends before the stop string; nothing of it is ever visible.

    Fails when only the newest piece is searched, or when nothing is held back."""
    text = OutputText(SamplingParams(stop=["END", "ENOUGH"]), decoder=TokenDecoder(ByteTokenizer()))
    shown, reasons = [], []
    for index, byte in enumerate(b"aEEN-ENb END"):
        reasons.append(text.check(byte, index + 1))
        shown.append(text.take_new())
        assert text.visible_text == "".join(shown)
    assert reasons == [None] * 11 + [FinishReason.STOP]
    assert shown == ["a", "", "E", "", "EN-", "", "", "ENb", " ", "", "", ""]
    assert (text.text, text.stop_reason, text.finished) == ("aEEN-ENb ", "END", True)


def test_stop_string_inclusion_and_choice() -> None:
    assert run("one STOP two", stop="STOP", include_stop_str_in_output=True).text == "one STOP"
    both = run("xabcd", stop=["abc", "b"])  # "b" ends first, wherever tokens are cut
    assert (both.text, both.stop_reason) == ("xa", "b")
    same_end = run("xabcd", stop=["c", "abc"])
    assert (same_end.text, same_end.stop_reason) == ("x", "abc")


@settings(max_examples=80, deadline=None)
@given(output=st.text(alphabet="ab<", max_size=30), cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
       stops=st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), min_size=1, max_size=3), include=st.booleans())
def test_the_cut_into_tokens_does_not_matter(output: str, cuts: list[int], stops: list[str], include: bool) -> None:
    """Tokens of several characters give the same end as single characters, and what is visible is never taken back.

    Fails when the first listed stop string wins instead of the first to end."""
    class Pieces:
        def __init__(self) -> None:
            self.pieces: list[str] = []

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
            return "".join(self.pieces[i] for i in token_ids)

    def outcome(pieces: list[str]) -> tuple[str, object]:
        tokenizer = Pieces()
        tokenizer.pieces = pieces
        text = OutputText(SamplingParams(stop=stops, max_tokens=None, include_stop_str_in_output=include),
                          decoder=TokenDecoder(tokenizer))
        shown = ""
        for token in range(len(pieces)):
            stopped = text.check(token, token + 1)
            assert text.visible_text.startswith(shown)
            shown = text.visible_text
            if stopped:
                break
        text.finish()
        assert text.text.startswith(shown)
        return text.text, text.stop_reason

    pieces, rest = [], output
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert outcome([p for p in pieces if p]) == outcome(list(output[: sum(cuts)]))


def test_eos_and_stop_ids() -> None:
    """Stop tokens leave no text, unless asked; a secondary EOS and stop ids name themselves as the reason.

    Fails when the EOS is appended to the text, or ignore_eos also ignores stop_token_ids."""
    text = run("ab!c", eos=(ord("!"), ord("?")))
    assert (text.text, text.stop_reason, text.finished) == ("ab", None, True)
    assert run("ab?c", eos=(ord("!"), ord("?"))).stop_reason == ord("?")
    ignoring = run("a!b#c", eos=(ord("!"),), ignore_eos=True, stop_token_ids=[ord("#")])
    assert (ignoring.text, ignoring.stop_reason) == ("a!b", ord("#"))
    assert run("ab!c", eos=(ord("!"),), include_stop_str_in_output=True).text == "ab!"


def test_min_tokens() -> None:
    """Nothing stops before min_tokens; a stop string may not end in the first min_tokens tokens.

    Fails with `>` for `>=` at the EOS (the min_tokens-th token may be one)."""
    assert run("a!b!c", eos=(ord("!"),), min_tokens=3).text == "a!b"
    assert run("!!!", eos=(ord("!"),), min_tokens=3).text == "!!"
    assert run("xaxxax", stop="x", min_tokens=3).text == "xax"
    assert run("xaxbax", stop="xb", min_tokens=3).text == "xa"


def test_without_detokenize_no_tokenizer_is_touched() -> None:
    class Untouchable:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
            raise AssertionError("decoded")

    params = SamplingParams(detokenize=False, stop_token_ids=[7])
    text = OutputText(params, eos_token_ids=[0], decoder=TokenDecoder(Untouchable()))
    assert [text.check(t, i + 1) for i, t in enumerate([5, 6, 7])] == [None, None, FinishReason.STOP]
    assert (text.text, text.take_new()) == ("", "")
    with pytest.raises(ValueError, match="stop"):
        OutputText(SamplingParams(stop=["x"]))


def test_finish_flushes_what_was_held() -> None:
    text = OutputText(SamplingParams(stop="END"), decoder=TokenDecoder(ByteTokenizer()))
    for index, byte in enumerate(b"okEN\xe4"):
        text.check(byte, index + 1)
    assert text.visible_text == "ok"
    text.finish()
    assert text.visible_text == "okEN\ufffd"


def test_random_streams_show_everything_once() -> None:
    rng = random.Random(4)
    tokenizer = TOKENIZERS["byte_level"]
    ids = [rng.randrange(330) for _ in range(400)]
    text = OutputText(SamplingParams(max_tokens=None, stop="never such a thing"), decoder=TokenDecoder(tokenizer))
    shown = ""
    for index, token in enumerate(ids):
        text.check(token, index + 1)
        shown += text.take_new()
    text.finish()
    assert shown + text.take_new() == text.text == tokenizer.decode(ids, skip_special_tokens=True)
