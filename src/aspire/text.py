"""From token ids to text, one token at a time: incremental detokenizer, stop strings, what is safe to show.

Knows nothing of requests beyond SamplingParams, and nothing of the server.
"""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from aspire.request import FinishReason, SamplingParams

REPLACEMENT = "\ufffd"
MAX_WINDOW = 64  # tokens without a clean boundary after which the bytes are taken as broken for good
CONTEXT_TOKENS = 8  # at most so many prompt tokens are decoded along with the first output tokens


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...


class TokenDecoder:
    """Decodes runs of ids with one tokenizer; made once per engine, shared by its requests.

    A transformers fast tokenizer is asked through its Rust backend: faster, and free of the clean-up of spaces, which
    may change text that was already shown.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode: Any = getattr(tokenizer, "backend_tokenizer", tokenizer).decode
        special = set(getattr(tokenizer, "all_special_ids", ()))
        for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
            if added.special:
                special.add(token)
        self.special_ids: frozenset[int] = frozenset(special)

    def decode(self, token_ids: list[int]) -> str:
        """The text of the ids, special tokens shown."""
        text: str = self._decode(token_ids, skip_special_tokens=False)
        return text


class IncrementalDetokenizer:
    """Turns tokens into text as they come; never gives out half a character. O(1) amortised per token.

    Decoding a token alone would lose the spaces and bytes that depend on its neighbours, so each piece is the
    difference of decoding a short window with and without the new tokens. The window starts where the last clean
    piece did. Text follows the prompt: a leading space that the tokenizer would drop at the start of a text is kept.
    """

    def __init__(self, decoder: TokenDecoder, prompt_token_ids: Sequence[int] = (), *,
                 skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._hidden: Collection[int] = decoder.special_ids if skip_special_tokens else ()
        self._window, text = self._context(prompt_token_ids)
        self._clean = len(self._window)  # tokens whose text was given out whole
        self._given = len(text) - _open_end(text)  # characters of the window given out
        self._before = text  # what the window shows if its first new character does not complete the prompt's last

    def append(self, token_id: int) -> str:
        """The text that the token completed; "" while a character is still open."""
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        open_end = _open_end(text)
        piece = text[self._start(text) : len(text) - open_end]
        if piece:
            self._given = self._start(text) + len(piece)
            self._before = ""
        if not open_end or len(self._window) > MAX_WINDOW:
            piece += text[self._start(text) :]
            self._before = ""
            self._window = self._window[self._clean :]
            self._clean = len(self._window)
            self._given = len(self._decoder.decode(self._window))
        return piece

    def flush(self) -> str:
        """At the end of the output: what an unfinished character shows as."""
        if len(self._window) == self._clean:
            return ""
        text = self._decoder.decode(self._window)
        piece = text[self._start(text) :]
        self._clean = len(self._window)
        return piece

    def _start(self, text: str) -> int:
        """Where in the window's text the part begins that was not given out yet."""
        return len(self._before) if text.startswith(self._before) and self._before else self._given

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The prompt's last tokens and their text, from the start of a character."""
        tokens = [token for token in prompt_token_ids[-CONTEXT_TOKENS:] if token not in self._hidden]
        while tokens:
            text = self._decoder.decode(tokens)
            if not text.startswith(REPLACEMENT):
                return tokens, text
            tokens = tokens[1:]
        return [], ""


def _open_end(text: str) -> int:
    """How many last characters the next bytes may still change. The whole run: a byte-fallback tokenizer shows every
    byte of a run as broken, those of its complete characters too, until the run's last character is complete."""
    return len(text) - len(text.rstrip(REPLACEMENT))


class OutputText:
    """A request's StopChecker: ends it at EOS, stop ids and stop strings, and keeps its text.

    With no decoder (SamplingParams.detokenize False) the text stays empty and only ids are looked at.
    Semantics are vLLM's: before min_tokens nothing stops; a stop token's own text is left out, and text ends before
    the stop string, unless include_stop_str_in_output. Of several matches the one that ends first wins (then the
    longest), so the result does not depend on where tokens are cut.
    """

    def __init__(self, params: SamplingParams, *, eos_token_ids: Sequence[int] = (),
                 decoder: TokenDecoder | None = None, prompt_token_ids: Sequence[int] = ()) -> None:
        """eos_token_ids: the model's; the first is the main one, the others report themselves as stop_reason.

        Raises ValueError for stop strings without a decoder."""
        self.params = params
        # A grammar ends with EOS, whatever min_tokens and ignore_eos say: nothing that follows would be bound by it.
        self._grammar = params.structured_outputs is not None
        self._eos_ids = () if params.ignore_eos and not self._grammar else tuple(eos_token_ids)
        self._stop_ids = frozenset(params.stop_ids)
        self._ending_ids = self._stop_ids.union(self._eos_ids)
        self._stops = params.stop_strings
        self._detokenizer: IncrementalDetokenizer | None = None
        if decoder is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(decoder, prompt_token_ids,
                                                       skip_special_tokens=params.skip_special_tokens)
        if self._stops and self._detokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, got stop={list(self._stops)!r} and none")
        self._reach = max((len(stop) for stop in self._stops), default=1) - 1
        self._pieces: list[str] = []
        self._tail = ""  # the last `_reach` characters: a stop string may begin there
        self._length = 0  # characters in all
        self._held = 0  # last characters that may yet turn out to begin a stop string
        self._shown = 0
        self.stop_reason: int | str | None = None
        self.finished = False

    @property
    def text(self) -> str:
        """All text so far, what is held back included."""
        if len(self._pieces) != 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def visible_text(self) -> str:
        """The text that no later token can take back."""
        return self.text[: self._length - self._held]

    def take_new(self) -> str:
        """The visible text since the last call."""
        end = self._length - self._held
        if end <= self._shown:
            return ""
        piece = self.text[self._shown : end]
        self._shown = end
        return piece

    def check(self, token_id: int, num_output: int) -> FinishReason | None:
        """Take the next output token; num_output counts it. STOP when the output ends with it."""
        assert not self.finished, "no token after the end"
        if token_id in self._ending_ids and self._may_stop(token_id, num_output):
            self.stop_reason = None if self._eos_ids and token_id == self._eos_ids[0] else token_id
            if self.params.include_stop_str_in_output:
                self._append(token_id)
            self.finish()
            return FinishReason.STOP
        if self._detokenizer is None:
            return None
        piece = self._append(token_id)
        if self._stops and piece:
            return self._look_for_stop(piece, num_output > self.params.min_tokens)
        return None

    def _may_stop(self, token_id: int, num_output: int) -> bool:
        return num_output >= self.params.min_tokens or (self._grammar and token_id in self._eos_ids)

    def finish(self) -> None:
        """No more tokens (length, abort, stop id): everything becomes visible. Harmless when called again."""
        if self.finished:
            return
        self.finished = True
        self._held = 0
        if self._detokenizer is not None:
            self._add(self._detokenizer.flush())

    def _append(self, token_id: int) -> str:
        piece = self._detokenizer.append(token_id) if self._detokenizer is not None else ""
        self._add(piece)
        return piece

    def _add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._length += len(piece)

    def _look_for_stop(self, piece: str, may_stop: bool) -> FinishReason | None:
        recent = self._tail + piece
        if may_stop:
            match = self._first_match(recent, len(self._tail))
            if match is not None:
                start, stop = match
                keep = start + len(stop) if self.params.include_stop_str_in_output else start
                self._cut(self._length - len(recent) + keep)
                self.stop_reason = stop
                self.finished = True
                self._held = 0
                return FinishReason.STOP
        self._tail = recent[len(recent) - min(self._reach, len(recent)) :]
        if not self.params.include_stop_str_in_output:
            self._held = max(_overlap(self._tail, stop) for stop in self._stops)
        return None

    def _first_match(self, recent: str, old: int) -> tuple[int, str] | None:
        """The stop string in `recent` that ends first after its first `old` characters."""
        found: list[tuple[int, int, str]] = []
        for stop in self._stops:
            start = recent.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _cut(self, length: int) -> None:
        self._pieces = [self.text[:length]]
        self._length = length


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
