"""What AsyncLLM needs of an engine, its limits, and the errors that its users meet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aspire.engine_stats import EngineStats
from aspire.request import RequestOutput, SamplingParams


class EngineLike(Protocol):
    """What AsyncLLM needs of an engine. All methods but `prepare` are called from the stepping thread only."""

    @property
    def tokenizer(self) -> Any: ...  # a transformers tokenizer, or something that encodes and decodes like one

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def has_unfinished(self) -> bool: ...

    def add(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *,
            prompt: str | None = None, priority: int = 0) -> None:
        """Raises ValueError for a request that cannot be served; the engine is then as before."""
        ...

    def prepare(self, params: SamplingParams) -> None:
        """Do what is slow about parameters ahead of `add`, on any thread. Raises ValueError."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request and return its blocks; unknown ids are ignored."""
        ...

    def step(self) -> list[RequestOutput]:
        """One output per request that advanced, with cumulative text and token ids."""
        ...

    def stats(self) -> EngineStats: ...


class EngineDeadError(RuntimeError):
    """The engine failed and serves nothing any more; `__cause__` is the failure."""


class QueueFullError(RuntimeError):
    """Too many live outputs; try again later."""


class DrainingError(RuntimeError):
    """The engine is shutting down and accepts no new request."""


@dataclass(frozen=True, slots=True)
class AsyncConfig:
    """max_live: most outputs (requests times their n) running or waiting at once. stats_interval: seconds between two
    snapshots."""

    max_live: int = 1024
    stats_interval: float = 0.1

    def __post_init__(self) -> None:
        if self.max_live < 1:
            raise ValueError(f"max_live must be >= 1, got {self.max_live!r}")
        if self.stats_interval < 0:
            raise ValueError(f"stats_interval must be >= 0, got {self.stats_interval!r}")
