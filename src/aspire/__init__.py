"""ASPIRE: batched self-speculative decoding in which each request decides when to verify.

Names resolve lazily so that `aspire.schedule` and `aspire.speculation` import without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aspire.async_engine import AsyncLLM
    from aspire.config import EngineConfig
    from aspire.llm import LLM
    from aspire.request import SamplingParams, StructuredOutputs
    from aspire.speculation.policy import PRESET_NAMES

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EngineConfig", "SamplingParams", "StructuredOutputs", "PRESET_NAMES"]

_HOMES = {
    "LLM": "aspire.llm",
    "AsyncLLM": "aspire.async_engine",
    "EngineConfig": "aspire.config",
    "SamplingParams": "aspire.request",
    "StructuredOutputs": "aspire.request",
    "PRESET_NAMES": "aspire.speculation.policy",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'aspire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
