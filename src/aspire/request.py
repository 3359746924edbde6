"""What a user asks for (SamplingParams), what the engine tracks (Request) and what comes back (RequestOutput).

Standard library only: the scheduler imports this.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aspire.schedule.plan import TokenLogprobs

LARGEST = 1e6  # of factors that meet float32 logits
TEMPERATURES = f"a number in [0, {LARGEST:g}]"
REPETITIONS = f"a number in [{1 / LARGEST:g}, {LARGEST:g}]"


class FinishReason(Enum):
    """Why a request ended; the values are OpenAI's, plus "abort"."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def _check(condition: bool, field_name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{field_name} must be {allowed}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint on the output; exactly one of the fields is set (names follow vLLM)."""

    json: str | dict[str, object] | None = None  # JSON schema
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # EBNF

    def __post_init__(self) -> None:
        chosen = [self.json is not None, self.json_object, self.regex is not None,
                  self.choice is not None, self.grammar is not None]
        if sum(chosen) != 1:
            raise ValueError("structured_outputs must set exactly one of json, json_object, regex, choice, grammar, "
                             f"got {sum(chosen)}")
        if self.choice is not None:
            listed = not isinstance(self.choice, str) and len(self.choice) > 0
            _check(listed and all(isinstance(one, str) and one for one in self.choice),
                   "structured_outputs.choice", self.choice, "a non-empty list of non-empty strings")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop; fields and defaults follow vLLM.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 are off. Raises ValueError naming field and value.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the model's limit
    min_tokens: int = 0
    stop: "str | Sequence[str] | None" = ()
    stop_token_ids: "Sequence[int] | None" = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: "Mapping[int, float] | None" = None
    bad_words: "Sequence[str] | None" = ()
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _check(_is_int(self.n) and self.n >= 1, "n", self.n, "an integer >= 1")
        _check(_is_number(self.temperature) and 0 <= self.temperature <= LARGEST, "temperature", self.temperature,
               TEMPERATURES)
        _check(_is_int(self.top_k) and -1 <= self.top_k < 1 << 31, "top_k", self.top_k,
               "an integer in [1, 2^31), or 0 or -1 for off")
        _check(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _check(self.seed is None or _is_int(self.seed), "seed", self.seed, "an integer or None")
        _check(self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1), "max_tokens",
               self.max_tokens, "an integer >= 1, or None")
        _check(_is_int(self.min_tokens) and 0 <= self.min_tokens < 1 << 31, "min_tokens", self.min_tokens,
               "an integer in [0, 2^31)")
        _check(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens,
               f"at most max_tokens ({self.max_tokens})")
        for name in ("stop_token_ids", "bad_words"):
            value = getattr(self, name)
            _check(value is None or (isinstance(value, Sequence) and not isinstance(value, str)), name, value, "a list")
        _check(self.stop is None or isinstance(self.stop, (str, Sequence)), "stop", self.stop, "a string or a list")
        _check(self.logit_bias is None or isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias,
               "a mapping from token ids to numbers")
        _check(self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs),
               "structured_outputs", self.structured_outputs, "a StructuredOutputs, or None")
        for text in self.stop_strings:
            _check(isinstance(text, str) and text != "", "stop", text, "a non-empty string")
        for token in self.stop_ids:
            _check(_is_int(token) and token >= 0, "stop_token_ids", token, "integers >= 0")
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, got detokenize=False")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or (_is_int(value) and 0 <= value <= 20), name, value,
                   "an integer in [0, 20], or None")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_is_number(value) and -2 <= value <= 2, name, value, "in [-2, 2]")
        _check(_is_number(self.repetition_penalty) and 1 / LARGEST <= self.repetition_penalty <= LARGEST,
               "repetition_penalty", self.repetition_penalty, REPETITIONS)
        for token, bias in (self.logit_bias or {}).items():
            _check(_is_int(token) and token >= 0, "logit_bias", token, "keyed by token ids >= 0")
            _check(_is_number(bias) and -100 <= bias <= 100, "logit_bias", bias, "in [-100, 100]")
        for word in self.banned_words:
            _check(isinstance(word, str) and word != "", "bad_words", word, "non-empty strings")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    @property
    def banned_words(self) -> tuple[str, ...]:
        return tuple(self.bad_words or ())


@dataclass(slots=True)
class RequestCounters:
    """What happened to a request; totals are sums of these. Times are seconds of `time.monotonic`."""

    num_drafted: int = 0  # drafts that reached a verdict
    num_accepted: int = 0
    num_emitted: int = 0  # tokens committed to the output
    num_verifications: int = 0  # full rows of a decoding request, with or without drafts
    num_wasted: int = 0  # drafts thrown away unverified (preemption, abort)
    num_preempted: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted; None before the first verified draft."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def tokens_per_verification(self) -> float | None:
        """Tokens committed by verifications over their number (the first token comes from the prefill)."""
        if not self.num_verifications:
            return None
        return (self.num_accepted + self.num_verifications) / self.num_verifications


class StopChecker(Protocol):
    """Sees each committed token in order and says whether the request ends with it."""

    def check(self, token_id: int, num_output: int) -> "FinishReason | None": ...


class Request:
    """One sequence being served. Counts, no status: what it is doing follows from them.

    num_known: prompt plus committed output. num_computed: tokens whose KV a full row wrote (or has in flight).
    num_drafted: drafts after the last known token that no verification took up yet.
    """

    __slots__ = (
        "counters",
        "finish_reason",
        "leader",
        "logprobs",
        "max_total",
        "num_computed",
        "num_drafted",
        "output_token_ids",
        "params",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "seed",
        "slot",
        "stop_checker",
    )

    def __init__(self, request_id: str, prompt_token_ids: "Sequence[int]", params: SamplingParams, *,
                 max_total: int, seed: int = 0, priority: int = 0, stop_checker: StopChecker | None = None,
                 leader: "Request | None" = None) -> None:
        """max_total: the most prompt plus output tokens this request may reach (max_tokens and the model's limit
        are folded in). leader: a sibling of the same prompt (n > 1) whose prefill this one waits to share."""
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.output_token_ids: list[int] = []
        self.num_computed = 0
        self.num_drafted = 0
        self.slot: int | None = None
        self.priority = priority
        self.counters = RequestCounters()
        self.stop_checker = stop_checker
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.leader = leader
        self.seed = seed
        self.max_total = max_total

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_known(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """A request's counters as the user sees them; rates are None where nothing was counted."""

    num_drafted: int
    num_accepted: int
    num_verifications: int
    num_preempted: int
    num_cached_tokens: int
    acceptance_rate: float | None
    tokens_per_verification: float | None
    time_to_first_token: float | None  # seconds from arrival
    latency: float | None  # seconds from arrival to the end
    queue_time: float | None = None  # seconds from arrival to the first step that held it


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's n outputs."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: "tuple[TokenLogprobs, ...] | None" = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's state as shown to its user; `outputs` has n entries once finished."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...] = field(default=())
    finished: bool = False
    metrics: RequestMetrics | None = None
    prompt_logprobs: "tuple[TokenLogprobs | None, ...] | None" = None
