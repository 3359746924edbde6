"""TokenText: single tokens as clients want to see them, in text and in bytes."""

import re
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level BPE vocabularies use for bytes: printable Latin-1 for itself, the rest from 256 up."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenText:
    """Caches what it finds; the cache is bounded by the vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._alphabet = _byte_alphabet()

    def raw(self, token_id: int) -> bytes:
        """The UTF-8 bytes the token stands for, possibly part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find(token_id)
        return found

    def text(self, token_id: int) -> str:
        """The token as text; broken characters as "bytes:\\x.." (OpenAI's way), so that different tokens differ."""
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _find(self, token_id: int) -> bytes:
        name = str(self._tokenizer.convert_ids_to_tokens([token_id])[0])
        match = BYTE_TOKEN.fullmatch(name)
        if match:
            return bytes([int(match[1], 16)])
        if name.startswith("\u2581"):
            return name.replace("\u2581", " ").encode()
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if "\ufffd" in text and all(char in self._alphabet for char in name):
            return bytes(self._alphabet[char] for char in name)
        return text.encode()
