"""The streaming parsers: however a text is cut into pieces, the result is that of the whole text."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.server.call_scanner import CallArguments, CallStart, Content
from aspire.server.reasoning import ThinkSplitter
from aspire.server.tools import HermesParser, JsonCallsParser, ToolParser, template_tool_format

NAMES = ("f", "get_time")
Result = tuple[str, list[tuple[str, str]]]


def parse(parser: ToolParser, pieces: list[str]) -> Result:
    content, calls = "", []
    for events in (*(parser.feed(piece) for piece in pieces), parser.finish()):
        for item in events:
            if isinstance(item, Content):
                content += item.text
            elif isinstance(item, CallStart):
                assert item.index == len(calls)
                calls.append((item.name, ""))
            else:
                assert isinstance(item, CallArguments)
                name, arguments = calls[item.index]
                calls[item.index] = (name, arguments + item.text)
    return content, calls


HERMES: list[tuple[str, Result]] = [
    ("plain text", ("plain text", [])),
    ("a < b and <tool", ("a < b and <tool", [])),
    ('<tool_call>{"name": "f", "arguments": {"x": [1, {"y": "}"}]}}</tool_call>',
     ("", [("f", '{"x": [1, {"y": "}"}]}')])),
    ('<tool_call>\n{"arguments": {"x": 1}, "name": "f"}\n</tool_call>', ("", [("f", '{"x": 1}')])),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 2}"}</tool_call>', ("", [("f", '{"x": 2}')])),
    ('<tool_call>{"name": "f", "arguments": "{\\q}"}</tool_call>', ("", [("f", "{\\q}")])),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\":\n2}"}</tool_call>', ("", [("f", '{"x":\n2}')])),
    ('<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>', ("", [("f", "\\ud800")])),
    ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', ("", [("f", "")])),
    ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
     ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', [])),
    ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("<tool_call>nonsense</tool_call> on", ("<tool_call>nonsense</tool_call> on", [])),
    ('<tool_call>{"nam": 1}</tool_call>', ('<tool_call>{"nam": 1}</tool_call>', [])),
    ('<tool_call>{"name": "f", "arguments": {"x": 1', ("", [("f", '{"x": 1')])),
    ('say <tool_call>{"na', ('say <tool_call>{"na', [])),
    ('<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g","arguments":{"a":null}}</tool_call>\n',
     ("", [("f", "{}"), ("g", '{"a":null}')])),
]
LLAMA: list[tuple[str, Result]] = [
    ("plain {text}", ("plain {text}", [])),
    ('{"name": "f", "parameters": {"x": 1}}', ("", [("f", '{"x": 1}')])),
    ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "get_time", "parameters": {}}',
     ("", [("f", '{"x": 1}'), ("get_time", "{}")])),
    ('{"answer": 42}', ('{"answer": 42}', [])),
    ('{"name": "unknown", "parameters": {}} tail', ('{"name": "unknown", "parameters": {}} tail', [])),
    ('[{"name": "f", "parameters": {"a": "]"}}, {"name": "f", "parameters": {"b": 2}}]',
     ("", [("f", '{"a": "]"}'), ("f", '{"b": 2}')])),
    ("[1, 2]", ("[1, 2]", [])),
    ("<|python", ("<|python", [])),
]
CASES = [(HermesParser, text, result) for text, result in HERMES]
CASES += [(lambda: JsonCallsParser(NAMES), text, result) for text, result in LLAMA]  # type: ignore[misc]


@pytest.mark.parametrize(("make", "text", "expected"), CASES, ids=[case[1][:40] for case in CASES])
def test_every_cut_gives_the_same(make: Callable[[], ToolParser], text: str, expected: Result) -> None:
    """Planted faults: no held-back beginning of a tag; json.loads of what a model wrote, unguarded."""
    assert parse(make(), [text]) == expected
    assert parse(make(), list(text)) == expected
    for cut in range(1, len(text)):
        assert parse(make(), [text[:cut], text[cut:]]) == expected, cut


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner,
                                                                                       max_size=3), max_leaves=6)


@given(st.dictionaries(st.text(max_size=6), json_values, max_size=4), st.lists(st.integers(1, 7), max_size=60),
       st.booleans())
def test_any_arguments_survive(arguments: dict[str, object], sizes: list[int], ascii_only: bool) -> None:
    raw = json.dumps(arguments, ensure_ascii=ascii_only)
    text = f'<tool_call>\n{{"name": "f", "arguments": {raw}}}\n</tool_call>'
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at:at + size])
        at += size
    _, calls = parse(HermesParser(), [*pieces, text[at:]])
    assert calls == [("f", raw)]


THOUGHTS = [
    ("x<think>", "so\n</think>\n\nyes", "so\n", "yes"),
    ("x", "<think>so</think>yes </think>", "so", "yes </think>"),
    ("x", "\n<think>\nso", "so", ""),
    ("x", "no thoughts <think>", "", "no thoughts <think>"),
    ("x", "<thin", "", "<thin"),
    ("x<think>\n", "cut </thi", "cut </thi", ""),
]


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content"), THOUGHTS, ids=[case[1][:30] for case in THOUGHTS])
def test_thoughts_every_cut(prompt: str, text: str, reasoning: str, content: str) -> None:
    for cut in range(len(text) + 1):
        splitter = ThinkSplitter(prompt)
        pieces = [splitter.feed(text[:cut]), splitter.feed(text[cut:]), splitter.finish()]
        assert ("".join(p[0] for p in pieces), "".join(p[1] for p in pieces)) == (reasoning, content), cut


def test_formats_are_told_from_templates() -> None:
    assert template_tool_format("... <tool_call> ...") == "hermes"
    assert template_tool_format("... <|python_tag|> ...") == "llama3_json"
    assert template_tool_format("{{ messages }}") == "none"
