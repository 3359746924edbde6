"""CallScanner: one tool call as JSON, read character by character, and the events that parsers emit."""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str
    id: str = field(default_factory=lambda: "call_" + uuid.uuid4().hex[:24])


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which are JSON text."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


class CallScanner:
    """Reads one JSON object {"name": ..., "arguments" or "parameters": {...}} character by character.

    Arguments are passed on raw, as they come, once the name is known.
    """

    __slots__ = ("_begin", "_depth", "_end", "_escaped", "_in_string", "_key", "_sent", "_string_begin", "_value_begin",
                 "done", "index", "name", "started", "text")

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.name: str | None = None
        self.started = False  # the name was passed on
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._string_begin = 0
        self._key: str | None = None
        self._value_begin: int | None = None  # of the value at depth 1 being read
        self._begin: int | None = None  # of the arguments
        self._end: int | None = None
        self._sent = 0

    def feed(self, text: str) -> int:
        """Take characters up to the object's end; returns how many."""
        base = len(self.text)
        self.text += text
        for i in range(base, len(self.text)):
            self._see(self.text[i], i)
            if self.done:
                self.text = self.text[:i + 1]
                return i + 1 - base
        return len(text)

    def events(self, accept: Callable[[str], bool] = bool) -> list[Event]:
        """What became known since the last call. `accept` tells whether a name is a tool's."""
        found: list[Event] = []
        if self.name is None or not accept(self.name):
            return found
        if not self.started:
            self.started = True
            found.append(CallStart(self.index, self.name))
        if self._begin is None:
            if self.done:
                found.append(CallArguments(self.index, "{}"))
            return found
        is_string = self.text[self._begin] == '"'
        if is_string and self._end is None:
            return found  # arguments as JSON inside a string: passed on whole
        piece = self.text[self._begin + self._sent:self._end]
        self._sent += len(piece)
        if is_string:
            piece = piece and (_string(piece) or piece[1:-1])
        if piece:
            found.append(CallArguments(self.index, piece))
        return found

    def _see(self, char: str, i: int) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1 and self._key is None:
                    self._key = self.text[self._string_begin + 1:i]
            return
        if self._depth == 1 and self._value_begin is None and self._key is not None and char not in ": \t\r\n":
            self._value_begin = i
            if self._key in ("arguments", "parameters") and char in '{"':
                self._begin = i
        if char == '"':
            self._in_string, self._string_begin = True, i
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 1:
                self._value_ends(i)
            self._depth -= 1
            if self._depth == 1 and self._begin is not None and self._end is None:
                self._end = i + 1
            self.done = self._depth == 0
        elif char == "," and self._depth == 1:
            self._value_ends(i)

    def _value_ends(self, i: int) -> None:
        if self._value_begin is not None:
            if self._key == "name":
                self.name = _string(self.text[self._value_begin:i])
            if self._begin == self._value_begin and self._end is None:
                self._end = self._begin + len(self.text[self._begin:i].rstrip())
        self._key = self._value_begin = None


def _string(raw: str) -> str | None:
    """The string that JSON text stands for; None for one that is empty, broken or no Unicode: models write such."""
    try:
        value = json.loads(raw, strict=False)  # line ends inside strings are common
        return value if isinstance(value, str) and value.encode() else None
    except ValueError:
        return None
