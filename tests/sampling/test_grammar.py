"""Grammars on a byte tokenizer: what compiles, what is refused, and speculation that verifies and rolls back."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("xgrammar")
from transformers import AutoTokenizer

from aspire.ops.judge.reference import leading_agreement
from aspire.ops.sample.reference import sample
from aspire.ops.sample.rows import SamplingRows
from aspire.request import Request, SamplingParams, StructuredOutputs
from aspire.sampling.grammar import GrammarCompiler, GrammarSlots, only_bit
from aspire.sampling.pipeline import LogitsPipeline
from aspire.sampling.rows import PickRows
from aspire.testing.models import BOS, EOS, VOCAB_SIZE, write_byte_tokenizer

PERSON = {"type": "object", "required": ["name", "age", "tags"], "properties": {
    "name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["a", "bc", "d"]}, "minItems": 1, "maxItems": 3},
    "extra": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}}}
SPECS = [StructuredOutputs(json=PERSON), StructuredOutputs(regex=r"[a-c]{2,6}-\d{1,4}"),
         StructuredOutputs(choice=("yes", "no", 'a "quoted"\nline', "né")),
         StructuredOutputs(grammar='root ::= "<" digit+ ">"\ndigit ::= [0-9]')]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(Path(path))
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])


def allowed(spec: StructuredOutputs, text: str) -> bool:
    if spec.json is not None:
        value = json.loads(text)
        return (0 <= value["age"] <= 120 and len(value["name"]) <= 6 and set(value["tags"]) <= {"a", "bc", "d"}
                and 1 <= len(value["tags"]) <= 3 and value.get("extra") in (None, True, False))
    if spec.regex is not None:
        return re.fullmatch(spec.regex, text) is not None
    if spec.choice is not None:
        return text in spec.choice
    return re.fullmatch(r"<\d+>", text) is not None


class ToyModel:
    """Logits from the last three tokens; the draft's differ from the target's by some noise. Quotes and closers are
    likelier, so that outputs stay short."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def logits(self, tokens: list[int], draft_error: float = 0.0) -> torch.Tensor:
        digest = hashlib.blake2b(repr((self.seed, tokens[-3:])).encode(), digest_size=7).digest()
        values = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))
        values = values[0] + draft_error * values[1]
        values[[ord(c) for c in '"]}>0123']] += 3
        values[[ord(c) for c in " \n\t\r"]] -= 4
        return values


def generate(compiler: GrammarCompiler, spec: StructuredOutputs, seed: int, draft_limit: int,
             use_forced: bool = False) -> tuple[list[int], int, int]:
    """(output, drafts, accepted) of one request: draft rounds of `draft_limit`, verified in one go; 0 is plain."""
    params = SamplingParams(temperature=1.0, max_tokens=None, structured_outputs=spec, frequency_penalty=0.1)
    request = Request("r", [1, 2, 3], params, max_total=10_000)
    pipeline = LogitsPipeline(1, VOCAB_SIZE, eos_token_ids=[EOS], tokenizer=None, device=torch.device("cpu"))
    grammars = GrammarSlots(1, VOCAB_SIZE)
    pipeline.admit(0, request)
    grammars.admit(0, compiler.matcher(compiler.compile(spec)))
    model, known = ToyModel(seed), list(request.prompt_token_ids)
    table = torch.zeros(2, max(draft_limit, 1), dtype=torch.int64)
    num_drafted = num_accepted = 0

    def pick(rows: list[tuple[list[int], float]]) -> torch.Tensor:
        """Picks after the given drafts."""
        n = len(rows)
        count = torch.tensor([len(drafts) for drafts, _ in rows])
        logits = torch.stack([model.logits(known + drafts, error) for drafts, error in rows])
        where = PickRows(torch.zeros(n, dtype=torch.int64), len(known) + count, count, table)
        mask = grammars.bitmask([(0, drafts) for drafts, _ in rows])
        logits = pipeline.apply(logits, where, [0], mask)
        values = SamplingRows(torch.ones(n), torch.zeros(n, dtype=torch.int32), torch.ones(n), torch.zeros(n),
                              torch.full((n,), seed), where.position, mode="plain")
        return sample(logits, values).token

    while len(known) < 600:
        drafts: list[int] = []
        while len(drafts) < draft_limit:
            forced = grammars.forced(0, drafts, draft_limit - len(drafts)) if use_forced else ()
            drafts += forced or [int(pick([(drafts, 0.7)]))]
            table[0, : len(drafts)] = torch.tensor(drafts)
        picks = pick([(drafts[:i], 0.0) for i in range(len(drafts) + 1)]).unsqueeze(0)
        drafted = torch.tensor([drafts], dtype=torch.int64).view(1, -1)
        accepted = int(leading_agreement(picks, drafted, torch.tensor([len(drafts)])))
        tokens = picks[0, : accepted + 1].tolist()
        num_drafted, num_accepted = num_drafted + len(drafts), num_accepted + accepted
        pipeline.commit(torch.tensor([0]), picks, torch.tensor([accepted + 1]), [0])
        if EOS in tokens:
            return known[3:] + tokens[: tokens.index(EOS)], num_drafted, num_accepted
        grammars.commit(0, tokens)
        known += tokens
    raise AssertionError("the output does not end")


def test_speculation_keeps_grammar_and_tokens(compiler: GrammarCompiler) -> None:
    """100 of 100 outputs at temperature 1 parse, and equal those of plain decoding; drafts are both accepted and
    rejected on the way, so the matcher rolls back.

    Fails when rejected drafts stay in the matcher, when a mask is computed without the drafts before it, and when
    drafts are not masked (acceptance falls)."""
    drafted = accepted = 0
    for run in range(100):
        spec = SPECS[run % len(SPECS)]
        output, d, a = generate(compiler, spec, run, draft_limit=1 + run % 5)
        assert allowed(spec, bytes(output).decode(errors="replace")), (spec, bytes(output))
        if run % 5 == 0:
            assert generate(compiler, spec, run, draft_limit=0)[0] == output
        drafted, accepted = drafted + d, accepted + a
    assert 0.4 < accepted / drafted < 0.95


def test_forced_tokens_are_always_accepted(compiler: GrammarCompiler) -> None:
    """With forced drafts the tokens stay the same, and more drafts are accepted.

    Fails when `forced` returns a token the grammar leaves a choice about."""
    spec = SPECS[0]
    plain = [generate(compiler, spec, seed, draft_limit=4) for seed in range(4)]
    forced = [generate(compiler, spec, seed, draft_limit=4, use_forced=True) for seed in range(4)]
    assert [run[0] for run in plain] == [run[0] for run in forced]
    slots = GrammarSlots(2, VOCAB_SIZE)
    slots.admit(1, compiler.matcher(compiler.compile(StructuredOutputs(regex="ab[cd]ef"))))
    assert slots.forced(1, [], 9) == tuple(b"ab")
    assert slots.forced(1, list(b"abd"), 9) == (*b"ef", EOS)
    assert slots.forced(1, list(b"abd"), 1) == tuple(b"e")
    assert slots.forced(1, list(b"x"), 9) == ()
    assert slots.forced(0, [], 9) == ()


def test_masks_follow_drafts_and_commits(compiler: GrammarCompiler) -> None:
    """Rows without a grammar allow everything; after the end, and after a token that is not allowed, too."""
    slots = GrammarSlots(3, VOCAB_SIZE)
    assert slots.bitmask([(0, []), (1, [])]) is None
    grammar = compiler.matcher(compiler.compile(StructuredOutputs(regex="ab(c|d)")))
    slots.admit(1, grammar, output=list(b"a"))  # resumed after a preemption

    def bits(drafts: bytes) -> list[int]:
        mask = slots.bitmask([(0, []), (1, list(drafts))])
        assert mask is not None
        assert (mask[0] == -1).all()
        return [t for t in range(VOCAB_SIZE) if int(mask[1, t // 32]) >> (t % 32) & 1]

    assert bits(b"") == [ord("b")]
    assert bits(b"b") == [ord("c"), ord("d")]
    assert bits(b"bc") == [EOS]
    assert bits(b"") == [ord("b")]
    assert bits(b"bd") == [EOS]
    slots.commit(1, list(b"bc"))  # the draft d was rejected
    assert bits(b"") == [EOS]
    slots.commit(1, [EOS])
    assert len(bits(b"")) == VOCAB_SIZE
    slots.commit(1, [5])
    assert not grammar.broken
    slots.admit(1, broken := compiler.matcher(compiler.compile(StructuredOutputs(regex="a"))))
    slots.commit(1, list(b"z"))
    assert broken.broken
    assert len(bits(b"")) == VOCAB_SIZE


def test_only_bit() -> None:
    for token in (0, 31, 32, 63, 70):
        words = torch.zeros(3, dtype=torch.int32)
        words[token // 32] = -(2**31) if token % 32 == 31 else 1 << (token % 32)
        assert only_bit(words) == token
    assert only_bit(torch.tensor([0, 3, 0], dtype=torch.int32)) is None
    assert only_bit(torch.tensor([1, 1, 0], dtype=torch.int32)) is None
    assert only_bit(torch.zeros(2, dtype=torch.int32)) is None


BAD = [
    (StructuredOutputs(json="{"), "structured_outputs.json is not valid"),
    (StructuredOutputs(json={"type": "nonsense"}), "nonsense"),
    (StructuredOutputs(json="5"), "object or a boolean"),
    (StructuredOutputs(json=""), "non-empty"),
    (StructuredOutputs(json={"type": "string", "format": "regex"}), "#/format"),
    (StructuredOutputs(json={"$ref": "http://example.com/a"}), r"#/\$ref"),
    (StructuredOutputs(json={"properties": {"x": {"not": {}}}}), "#/properties/x/not"),
    (StructuredOutputs(json={"type": "array", "items": {"type": "integer"}, "uniqueItems": True}), "uniqueItems"),
    (StructuredOutputs(json={"anyOf": [{"type": "string"}], "minLength": 2}), "anyOf cannot be combined"),
    (StructuredOutputs(json={"allOf": [{"minimum": 1}, {"maximum": 2}]}), "allOf"),
    (StructuredOutputs(json={"type": "string", "pattern": "a", "maxLength": 2}), "pattern cannot be combined"),
    (StructuredOutputs(json={"type": "string", "pattern": 'a"'}), "quotes"),
    (StructuredOutputs(json={"properties": []}), "#/properties must be an object"),
    (StructuredOutputs(json='{"items":' * 5000 + "{}" + "}" * 5000), "nested"),
    (StructuredOutputs(regex="(a"), "structured_outputs.regex is not valid.*parenthesis"),
    (StructuredOutputs(regex="x" * (1 << 18) + "y"), "at most"),
    (StructuredOutputs(grammar='root ::= "a" other'), "structured_outputs.grammar is not valid"),
    (StructuredOutputs(grammar="root ::= root"), "must allow some output"),
]


@pytest.mark.parametrize(("spec", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_constraints_are_refused(compiler: GrammarCompiler, spec: StructuredOutputs, message: str) -> None:
    """A ValueError that names the field, and the compiler goes on working.

    Fails when xgrammar's RuntimeError comes through."""
    with pytest.raises(ValueError, match=f"(?s){message}") as error:
        compiler.compile(spec)
    assert "structured_outputs" in str(error.value)
    assert "/project/" not in str(error.value)
    compiler.compile(StructuredOutputs(regex="a"))


def test_unenforced_names_are_allowed_as_property_names(compiler: GrammarCompiler) -> None:
    """Fails when the check walks into `properties` as if it were a schema, or into enum values."""
    compiler.compile(StructuredOutputs(json={
        "title": "not", "type": "object", "required": ["if"],
        "properties": {"if": {"type": "string"}, "not": {"enum": [{"not": 1}, "x"]}, "format": {"$ref": "#/$defs/d"}},
        "$defs": {"d": {"description": "then", "type": "string", "format": "date"}}}))
    for value in ("true", {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "T"}):
        compiler.compile(StructuredOutputs(json=value))


def test_compilation_is_bounded_in_time(tokenizer: Any) -> None:
    """A compilation that takes too long is refused in time, and only a few may go on in the background.

    Fails when compile waits for the thread."""
    slow = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS], timeout=0.05)
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string", "pattern": f"[a-z]{{1,40}}{i}"}
                                             for i in range(400)}}
    with pytest.raises(ValueError, match=r"structured_outputs.json must compile within 0.05 s"):
        slow.compile(StructuredOutputs(json=wide))


def test_whitespace_is_bounded(compiler: GrammarCompiler) -> None:
    """A model that only likes blanks cannot go on for ever."""
    grammar = compiler.matcher(compiler.compile(StructuredOutputs(json_object=True)))
    grammar.commit(list(b"{" + b" " * 40))
    assert not grammar.broken
    grammar.commit(list(b" "))
    assert grammar.broken


def test_special_tokens_do_not_pass_as_text(compiler: GrammarCompiler) -> None:
    """Inside a string any text is allowed, but not the token "<bos>", whose text the output would not show.

    Fails without the mask of special tokens."""
    grammar = compiler.matcher(compiler.compile(StructuredOutputs(json={"type": "string"})))
    mask = torch.zeros(9, dtype=torch.int32)
    grammar.mask(list(b'"<'), mask)
    assert int(mask[BOS // 32]) >> (BOS % 32) & 1 == 0
    assert int(mask[ord("b") // 32]) >> (ord("b") % 32) & 1 == 1
    grammar.mask(list(b'"<"'), mask)
    assert int(mask[EOS // 32]) >> (EOS % 32) & 1 == 1


STRING_SCHEMAS = [
    {"type": "string", "maxLength": 3}, {"type": "string", "minLength": 1}, {"type": "string"},
    {"type": "string", "pattern": "^.?$"}, {"type": "string", "pattern": r"^[^c]*\w?\s*$"},
    {"type": "string", "pattern": "^a?|.$"},
]


@pytest.mark.parametrize("schema", STRING_SCHEMAS, ids=str)
def test_strings_hold_no_control_characters(compiler: GrammarCompiler, schema: dict[str, object]) -> None:
    """Of all bytes, exactly those that JSON allows unescaped in a string come through.

    Fails without `close_strings`: xgrammar 0.2.9 lets control characters into strings of bounded length."""
    compiled = compiler.compile(StructuredOutputs(json=schema))
    for byte in range(128):
        grammar = compiler.matcher(compiled)
        grammar.commit([*b'"', byte, *b'"', EOS])
        if not grammar.broken:
            json.loads(b'"' + bytes([byte]) + b'"')
    ordinary = compiler.matcher(compiled)
    ordinary.commit([*b'"a"', EOS])
    assert not ordinary.broken


def test_missing_tokenizer() -> None:
    with pytest.raises(ValueError, match="structured_outputs need a tokenizer"):
        GrammarCompiler(None, VOCAB_SIZE, [EOS])
