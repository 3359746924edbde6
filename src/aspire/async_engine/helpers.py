"""Helpers: threads for what would stop streams if it ran on the event loop or the stepping thread."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aspire.async_engine.protocol import EngineLike
from aspire.request import SamplingParams

SHORT_TEXT = 2000  # characters that are tokenized sooner than they are handed over


class Helpers:
    """One thread tokenizes, two compile grammars."""

    def __init__(self) -> None:
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="aspire-tokenize")
        self._preparer = ThreadPoolExecutor(2, thread_name_prefix="aspire-grammar")

    async def encode(self, tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
        def work() -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if len(text) < SHORT_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    async def prepare(self, engine: EngineLike, params: SamplingParams) -> None:
        """Grammars may take seconds to compile."""
        await asyncio.get_running_loop().run_in_executor(self._preparer, engine.prepare, params)

    def close(self) -> None:
        """Start nothing more; what runs goes on."""
        for pool in (self._encoder, self._preparer):
            pool.shutdown(wait=False, cancel_futures=True)
