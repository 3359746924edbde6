"""Structured output: compiles constraints with xgrammar (imported here only) and follows each slot's output."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aspire.request import StructuredOutputs
from aspire.sampling.mask import num_words
from aspire.sampling.schema import check_schema, close_strings

MAX_SOURCE = 1 << 18  # characters of a schema, regex or grammar
MAX_CACHED = 256  # compiled grammars
MAX_WHITESPACE = 40  # characters between two tokens of JSON: a model cannot go on with blanks for ever
CACHE_BYTES = 256 << 20
MAX_COMPILING = 2  # compilations that run on past their time limit; more are refused until one ends


class GrammarCompiler:
    """Turns StructuredOutputs into grammars, bounded in time and memory; results are cached. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int], *, timeout: float = 20.0) -> None:
        """vocab_size: of the model's logits. Raises ValueError when the tokenizer cannot be used or xgrammar is not
        installed."""
        if tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, and this model has none")
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError("structured_outputs need xgrammar: pip install 'aspire-llm[grammar]'") from error
        self._xgrammar: Any = xgrammar
        self.vocab_size = vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size,
                                                       stop_token_ids=list(eos_token_ids))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=CACHE_BYTES)
        self._timeout = timeout
        self._text_bits = _text_tokens(tokenizer, vocab_size, eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._running = threading.Semaphore(MAX_COMPILING)

    def compile(self, spec: StructuredOutputs) -> Any:
        """A compiled grammar. Raises ValueError naming the field: a schema, regex or grammar that does not parse, that
        could not be enforced, that allows no output, or that takes longer than the time limit."""
        name, source = _source(spec)
        key = f"{name}:{source}"
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        compiled = self._bounded(name, self._maker(name, source))
        if not self.matcher(compiled).can_begin:
            raise ValueError(f"structured_outputs.{name} must allow some output, got {_short(source)}")
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def matcher(self, compiled: Any) -> "SlotGrammar":
        """A follower of one output."""
        return SlotGrammar(self._xgrammar.GrammarMatcher(compiled), self._text_bits)

    def _maker(self, name: str, source: str) -> Callable[[], Any]:
        compiler = self._compiler
        if name in ("json", "json_object"):
            return lambda: compiler.compile_grammar(close_strings(str(
                self._xgrammar.Grammar.from_json_schema(source, max_whitespace_cnt=MAX_WHITESPACE))))
        if name == "regex":
            return lambda: compiler.compile_regex(source)
        return lambda: compiler.compile_grammar(source)

    def _bounded(self, name: str, make: Callable[[], Any]) -> Any:
        """Runs in a thread of its own, which a compilation without end keeps; so their number is bounded too."""
        if not self._running.acquire(timeout=self._timeout):
            raise ValueError(f"structured_outputs.{name}: other grammars are still compiling, try again later")
        result: list[Any] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                result.append(make())
            except Exception as error:
                errors.append(error)
            finally:
                self._running.release()

        thread = threading.Thread(target=work, name="grammar-compile", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if errors:
            raise ValueError(f"structured_outputs.{name} is not valid: {_reason(errors[0])}") from errors[0]
        if not result:
            raise ValueError(f"structured_outputs.{name} must compile within {self._timeout:g} s, got a longer one")
        return result[0]


class SlotGrammar:
    """Follows one output through its grammar: the committed tokens, then drafts that may be taken back.

    After the end (a stop token), and after a token that the grammar does not allow, everything is allowed: plain
    decoding has stopped there.
    """

    def __init__(self, matcher: Any, text_bits: Tensor) -> None:
        self._matcher = matcher
        self._text_bits = text_bits
        self._drafts: list[int] = []  # accepted by the matcher, not committed
        self._bits = torch.empty(1, len(text_bits), dtype=torch.int32)
        self.broken = False  # a committed token was not allowed

    @property
    def can_begin(self) -> bool:
        """Whether anything is allowed next."""
        self._fill()
        return bool((self._bits != 0).any())

    def mask(self, drafts: Sequence[int], out: Tensor) -> None:
        """The bits of what may follow the committed tokens and `drafts`, into int32 [ceil(V / 32)]."""
        if not self.broken and self._move_to(drafts):
            self._fill()
            out.copy_(self._bits[0])
        else:
            out.fill_(-1)

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens of a verdict, in order; drafts that are not among them are taken back."""
        if self.broken:
            return
        if self._matcher.is_terminated() and not self._drafts:
            return  # ignore_eos: the output goes on after the grammar's end
        self.broken = not self._move_to(tokens) and not self._matcher.is_terminated()
        self._drafts.clear()

    def forced(self, drafts: Sequence[int], limit: int) -> tuple[int, ...]:
        """The tokens after `drafts` that the grammar leaves no choice about, at most `limit`: free drafts."""
        run: list[int] = []
        while len(run) < limit and not self.broken and self._move_to([*drafts, *run]):
            if self._matcher.is_terminated():
                break
            self._fill()
            token = only_bit(self._bits[0])
            if token is None:
                break
            run.append(token)
        return tuple(run)

    def _fill(self) -> None:
        if self._matcher.is_terminated():
            self._bits.fill_(-1)
        else:
            self._matcher.fill_next_token_bitmask(self._bits)
            self._bits &= self._text_bits

    def _move_to(self, drafts: Sequence[int]) -> bool:
        """Whether all of them are allowed; stands after the last one that is."""
        common = 0
        while common < min(len(drafts), len(self._drafts)) and drafts[common] == self._drafts[common]:
            common += 1
        if len(self._drafts) > common:
            self._matcher.rollback(len(self._drafts) - common)
            del self._drafts[common:]
        for token in drafts[common:]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            self._drafts.append(token)
        return True


class GrammarSlots:
    """The grammars of all slots. Lives on the host: needs the values of drafts, so it works with the plain loop."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._slots: list[SlotGrammar | None] = [None] * (num_slots + 1)
        self._bound: set[int] = set()  # slots that have one
        self._num_words = num_words(vocab_size)

    def admit(self, slot: int, grammar: SlotGrammar | None, output: Sequence[int] = ()) -> None:
        """The slot now belongs to a request with that grammar, or none. output: committed before a preemption."""
        self._slots[slot] = grammar
        self._bound.discard(slot)
        if grammar is not None:
            self._bound.add(slot)
            grammar.commit(output)

    def needed(self, slots: Iterable[int]) -> bool:
        return bool(self._bound) and not self._bound.isdisjoint(slots)

    def bitmask(self, picks: Sequence[tuple[int, Sequence[int]]]) -> Tensor | None:
        """Masks int32 [N, ceil(V / 32)] of N picks, each a slot and the drafts before the pick; None if all is allowed.

        Asking for a verification's picks in order (drafts[:0], drafts[:1], ...) costs one accepted token each."""
        if not self.needed([slot for slot, _ in picks]):
            return None
        masks = torch.full((len(picks), self._num_words), -1, dtype=torch.int32)
        for row, (slot, drafts) in enumerate(picks):
            grammar = self._slots[slot]
            if grammar is not None:
                grammar.mask(drafts, masks[row])
        return masks

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        """The tokens that a row of the slot emitted."""
        grammar = self._slots[slot]
        if grammar is not None:
            grammar.commit(tokens)

    def is_broken(self, slot: int) -> bool:
        """Whether the slot's grammar met a committed token that it does not allow."""
        grammar = self._slots[slot]
        return grammar is not None and grammar.broken

    def forced(self, slot: int, drafts: Sequence[int], limit: int) -> tuple[int, ...]:
        """Drafts that need no model after `drafts` (see SlotGrammar.forced)."""
        grammar = self._slots[slot]
        return () if grammar is None else grammar.forced(drafts, limit)


def _text_tokens(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> Tensor:
    """Bits int32 [W] of the tokens that may occur under a grammar: not the special ones, which would pass for their
    name's letters and then be left out of the text, except those that end the output."""
    allowed = np.ones(32 * num_words(vocab_size), dtype=np.uint8)
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.special and token not in eos_token_ids and token < vocab_size:
            allowed[token] = 0
    return torch.from_numpy(np.packbits(allowed, bitorder="little").view(np.int32).copy())


def only_bit(words: Tensor) -> int | None:
    """The token of a mask int32 [W] that allows just one; else None."""
    nonzero = np.flatnonzero(words.numpy())
    if len(nonzero) != 1:
        return None
    value = int(words[int(nonzero[0])]) & 0xFFFFFFFF
    return None if value & (value - 1) else int(nonzero[0]) * 32 + value.bit_length() - 1


def _source(spec: StructuredOutputs) -> tuple[str, str]:
    """Name of the field that is set and its text, checked as far as no tokenizer is needed."""
    if spec.json is not None:
        return "json", _schema_text(spec.json)
    if spec.json_object:
        return "json_object", '{"type": "object"}'
    if spec.regex is not None:
        return "regex", _limited("regex", spec.regex)
    if spec.grammar is not None:
        return "grammar", _limited("grammar", spec.grammar)
    assert spec.choice is not None, "exactly one field is set"
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in spec.choice)
    return "choice", _limited("choice", f"root ::= {choices}")


def _schema_text(schema: str | dict[str, object]) -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        check_schema(json.loads(_limited("json", text)))
    except RecursionError as error:
        raise ValueError("structured_outputs.json is not valid: nested too deeply") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"structured_outputs.json is not valid: {error}") from error
    return text


def _limited(name: str, text: str) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError(f"structured_outputs.{name} must be a non-empty string, got {text!r}")
    if len(text) > MAX_SOURCE:
        raise ValueError(f"structured_outputs.{name} must have at most {MAX_SOURCE} characters, got {len(text)}")
    return text


def _reason(error: Exception) -> str:
    """xgrammar's message without the place in its sources."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.split(": ", 1)[1] if text.startswith("[") and ": " in text else text


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")
