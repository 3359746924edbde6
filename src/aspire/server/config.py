"""ServerConfig: everything about the HTTP side, nothing about the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ToolFormat = Literal["auto", "hermes", "llama3_json", "none"]
ReasoningFormat = Literal["auto", "think", "none"]

TOOL_FORMATS = ("auto", "hermes", "llama3_json", "none")
REASONING_FORMATS = ("auto", "think", "none")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Limits refuse with 4xx; times are seconds; None is "no limit". Raises ValueError naming field and value.

    api_keys: any of these opens the API; none: open to all. request_timeout: from acceptance to the last token; a
    request may ask for less with its `timeout` field. write_timeout: a client that takes nothing for so long is cut
    off. shutdown_grace: how long running requests may go on after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()  # the first one is shown; none: the engine's name
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # CORS; none: off
    max_body_bytes: int = 16 << 20
    max_prompts: int = 1024  # per completions request
    max_n: int = 64
    max_output_tokens: int | None = None
    max_grammar_bytes: int = 64 << 10  # of a JSON schema, regex or grammar
    request_timeout: float | None = None
    write_timeout: float = 60.0
    read_timeout: float = 60.0  # for a body to arrive
    shutdown_grace: float = 30.0
    tool_format: ToolFormat = "auto"  # auto: told from the chat template
    reasoning_format: ReasoningFormat = "auto"
    chat_template: str | None = None
    default_sampling: Mapping[str, object] = field(default_factory=dict)  # where a request says nothing
    log_prompts: bool = False
    dashboard: bool = True

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_prompts", "max_n", "max_output_tokens", "max_grammar_bytes",
                     "request_timeout", "write_timeout", "read_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value!r}")
        if not self.shutdown_grace >= 0:
            raise ValueError(f"shutdown_grace must be >= 0, got {self.shutdown_grace!r}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in [0, 65535], got {self.port!r}")
        if self.tool_format not in TOOL_FORMATS:
            raise ValueError(f"tool_format must be one of {', '.join(TOOL_FORMATS)}, got {self.tool_format!r}")
        if self.reasoning_format not in REASONING_FORMATS:
            raise ValueError(f"reasoning_format must be one of {', '.join(REASONING_FORMATS)}, "
                             f"got {self.reasoning_format!r}")
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("api_keys must not hold an empty key")
