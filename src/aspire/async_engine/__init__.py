"""The asynchronous engine: AsyncLLM and what it needs of an engine."""

from aspire.async_engine.latency import Histogram, Latency
from aspire.async_engine.llm import AsyncLLM
from aspire.async_engine.protocol import (
    AsyncConfig,
    DrainingError,
    EngineDeadError,
    EngineLike,
    QueueFullError,
)
from aspire.async_engine.streams import OutputStream
from aspire.engine_stats import EngineStats, RequestView

__all__ = ["AsyncLLM", "AsyncConfig", "EngineLike", "EngineStats", "RequestView", "OutputStream", "EngineDeadError",
           "QueueFullError", "DrainingError", "Latency", "Histogram"]
