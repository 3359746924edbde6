"""ThinkSplitter: tells what a model thinks (<think> ... </think>) from what it says, as the text comes in."""

OPEN, CLOSE = "<think>", "</think>"


def template_thinks(template: str) -> bool:
    """Whether a chat template belongs to a model that thinks in <think> tags."""
    return CLOSE in template


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


class ThinkSplitter:
    """feed() and finish() return (reasoning, content). `prompt` ends inside the tag for templates that open it."""

    def __init__(self, prompt: str) -> None:
        self._state = "inside" if prompt.rstrip().endswith(OPEN) else "before"
        self._buffer = ""
        self._fresh = True  # nothing but white space was seen in this part

    def feed(self, text: str) -> tuple[str, str]:
        self._buffer += text
        reasoning = ""
        if self._state == "before":
            start = self._buffer.lstrip()
            if start.startswith(OPEN):
                self._state, self._buffer = "inside", start[len(OPEN):]
            elif OPEN.startswith(start):
                return "", ""
            else:
                self._state, self._fresh = "after", False
        if self._state == "inside":
            reasoning = self._inside()
        if self._state == "after":
            return reasoning, self._take(len(self._buffer))
        return reasoning, ""

    def finish(self) -> tuple[str, str]:
        """What was held back, now that nothing follows."""
        rest = self._take(len(self._buffer))
        return (rest, "") if self._state == "inside" else ("", rest)

    def _inside(self) -> str:
        end = self._buffer.find(CLOSE)
        if end < 0:
            return self._take(len(self._buffer) - held_back(self._buffer, CLOSE))
        text = self._take(end)
        self._buffer = self._buffer[len(CLOSE):]
        self._state, self._fresh = "after", True
        return text

    def _take(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text
