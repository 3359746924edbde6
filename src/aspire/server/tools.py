"""Tool calls in a model's text, parsed as it streams: Hermes/Qwen tags, Llama 3 JSON, and constrained JSON.

A parser turns text into events. The same parser serves whole answers: they are one long piece of text.
"""

from typing import Protocol

from aspire.server.call_scanner import CallArguments, CallScanner, CallStart, Content, Event
from aspire.server.reasoning import held_back

OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"


class ToolParser(Protocol):
    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """What was held back, now that nothing follows."""
        ...


def template_tool_format(template: str) -> str:
    """The format a chat template teaches its model; "none" when it teaches none that we know."""
    if OPEN in template:
        return "hermes"
    return "llama3_json" if PYTHON_TAG in template or "ipython" in template else "none"


def make_parser(tool_format: str, names: tuple[str, ...]) -> ToolParser:
    return HermesParser() if tool_format == "hermes" else JsonCallsParser(names)


class HermesParser:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, between ordinary text."""

    def __init__(self) -> None:
        self._buffer = ""
        self._scanner: CallScanner | None = None  # inside a tag
        self._count = 0
        self._white = ""  # white space that is content only if no call follows it

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        found: list[Event] = []
        while self._buffer and self._advance(found):
            pass
        return found

    def finish(self) -> list[Event]:
        scanner, rest = self._scanner, self._buffer
        self._buffer, self._scanner = "", None
        if scanner is not None:
            return [] if scanner.started else [Content(self._white + OPEN + scanner.text + rest)]
        rest = self._white + rest
        return [Content(rest)] if rest.strip() or (rest and self._count == 0) else []

    def _advance(self, found: list[Event]) -> bool:
        """Deal with the front of the buffer; False: more text is needed."""
        if self._scanner is None:
            return self._outside(found)
        if not self._scanner.text:
            self._buffer = self._buffer.lstrip()
            if self._buffer and not self._buffer.startswith("{"):
                return self._malformed(found)
        if not self._scanner.done:
            taken = self._scanner.feed(self._buffer)
            self._buffer = self._buffer[taken:]
            found += self._scanner.events()
            if self._scanner.done and not self._scanner.started:
                return self._malformed(found)
            if self._scanner.started:
                self._white = ""
            return bool(self._buffer)
        return self._closing()

    def _outside(self, found: list[Event]) -> bool:
        start = self._buffer.find(OPEN)
        size = start if start >= 0 else len(self._buffer) - held_back(self._buffer, OPEN)
        text = self._white + self._buffer[:size]
        said = text.rstrip()
        self._white = text[len(said):]
        if said:
            found.append(Content(said))
        self._buffer = self._buffer[size:]
        if start < 0:
            return False
        self._buffer = self._buffer[len(OPEN):]
        self._scanner = CallScanner(self._count)
        return True

    def _closing(self) -> bool:
        end = self._buffer.find(CLOSE)
        if end < 0:
            return False
        self._buffer = self._buffer[end + len(CLOSE):]
        self._scanner = None
        self._count += 1
        return True

    def _malformed(self, found: list[Event]) -> bool:
        """Not a call after all: show the text as it was written."""
        assert self._scanner is not None
        found.append(Content(self._white + OPEN + self._scanner.text))
        self._scanner, self._white = None, ""
        return True


class JsonCallsParser:
    """Calls as bare JSON objects, separated by ; or , (Llama 3), or as one array (constrained output).

    An answer that does not begin like a call, or names no known tool, is content.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._buffer = ""
        self._scanner: CallScanner | None = None
        self._count = 0
        self._is_content = False

    def feed(self, text: str) -> list[Event]:
        if self._is_content:
            return [Content(text)] if text else []
        self._buffer += text
        found: list[Event] = []
        while self._buffer and self._advance(found):
            pass
        return found

    def finish(self) -> list[Event]:
        scanner, rest = self._scanner, self._buffer
        if scanner is not None:
            rest = "" if scanner.started else scanner.text
        self._buffer, self._scanner = "", None
        return [Content(rest)] if rest.strip(" \t\r\n;,[]") else []

    def _advance(self, found: list[Event]) -> bool:
        if self._scanner is None:
            return self._between(found)
        taken = self._scanner.feed(self._buffer)
        self._buffer = self._buffer[taken:]
        found += self._scanner.events(self._names.__contains__)
        if self._scanner.done:
            if not self._scanner.started:
                self._give_up(found, self._scanner.text)
                return False
            self._scanner = None
            self._count += 1
        return bool(self._buffer)

    def _between(self, found: list[Event]) -> bool:
        front = self._buffer.lstrip(" \t\r\n;,[]" if self._count else " \t\r\n[")
        if self._count == 0 and PYTHON_TAG.startswith(front[:len(PYTHON_TAG)]) and front:
            if len(front) < len(PYTHON_TAG):
                return False
            front = front[len(PYTHON_TAG):].lstrip()
        if not front:
            return False
        if front[0] != "{":
            self._give_up(found, "")
            return False
        self._buffer = front
        self._scanner = CallScanner(self._count)
        return True

    def _give_up(self, found: list[Event], text: str) -> None:
        found.append(Content(text + self._buffer))
        self._buffer, self._scanner, self._is_content = "", None, True


class NamedCallParser:
    """tool_choice names the function: the whole constrained output is its arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Event]:
        found: list[Event] = []
        if self._name is not None:
            found.append(CallStart(0, self._name))
            self._name = None
        if text:
            found.append(CallArguments(0, text))
        return found

    def finish(self) -> list[Event]:
        return []
