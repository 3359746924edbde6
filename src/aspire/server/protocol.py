"""Request bodies as OpenAI and vLLM define them. A field that is not implemented is refused by its name.

Knows nothing of the engine; numbers are only checked here where SamplingParams cannot.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

# Seeds leave room for the n outputs of a request, which count up from them.
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1 - 2**16)]
Count = Annotated[int, Field(ge=0, le=2**31)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Body(BaseModel):
    """Base of all bodies: strict types, no unknown fields. UNSUPPORTED: known fields, and the values meaning "off"."""

    model_config = ConfigDict(extra="forbid", strict=True)
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict) or cls.UNSUPPORTED.keys().isdisjoint(data):
            return data
        for name in cls.UNSUPPORTED.keys() & data.keys():
            if data[name] is not None and data[name] not in cls.UNSUPPORTED[name]:
                raise PydanticCustomError("unsupported_field", "{field} is not supported by this server",
                                          {"field": name})
        return {name: value for name, value in data.items() if name not in cls.UNSUPPORTED}


    def sent_as(self, name: str) -> str:
        """The client's name for what the engine calls `name`."""
        return name


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputsBody(Body):
    """vLLM's `structured_outputs`: exactly one of the fields."""

    UNSUPPORTED = {"structural_tag": (), "disable_fallback": (False,), "disable_any_whitespace": (False,),
                   "disable_additional_properties": (False,), "whitespace_pattern": (), "backend": ()}
    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class JsonSchemaFormat(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


CONSTRAINTS = ("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice",
               "guided_grammar")


class SamplingBody(Body):
    """What chat and plain completions share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=2**16)] = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    min_tokens: Count = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e6)] | None = None  # ours: seconds
    user: str | None = None  # an opaque label; has no effect on the result

    def sent_as(self, name: str) -> str:
        if name == "structured_outputs":
            return next((sent for sent in CONSTRAINTS if getattr(self, sent) is not None), name)
        return name


SHARED_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "use_beam_search": (False,), "length_penalty": (1.0,), "best_of": (1,), "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,), "allowed_token_ids": (), "prompt_logprobs": (), "logits_processors": (),
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "kv_transfer_params": (), "vllm_xargs": (),
    "cache_salt": (), "mm_processor_kwargs": (), "include_reasoning": (True,), "return_tokens_as_token_ids": (False,),
    "thinking_token_budget": (),
}


class CompletionRequest(SamplingBody):
    """POST /v1/completions. The prompt is text or token ids, or a list of either."""

    UNSUPPORTED = {**SHARED_UNSUPPORTED, "suffix": (), "prompt_embeds": ()}
    prompt: str | list[str] | list[Token] | list[list[Token]]
    max_tokens: Count | None = 16
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool = True


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    UNSUPPORTED = {"audio": (), "refusal": (), "function_call": (), "annotations": ([],)}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class ChatBody(Body):
    """What it takes to make a prompt of a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[ToolDefinition] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(SamplingBody, ChatBody):
    """POST /v1/chat/completions."""

    UNSUPPORTED = {**SHARED_UNSUPPORTED, "functions": (), "function_call": (), "modalities": (["text"],), "audio": (),
                   "prediction": (), "web_search_options": (), "reasoning_effort": (), "verbosity": (),
                   "service_tier": ("auto", "default"), "store": (False,), "metadata": (), "echo": (False,),
                   "chat_template": (), "documents": (), "safety_identifier": (), "prompt_cache_key": ()}
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True

    def sent_as(self, name: str) -> str:
        if name == "prompt":
            return "messages"
        if name == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if name == "structured_outputs" and self.tool_choice not in (None, "none", "auto"):
            return "tools"  # their grammar; no other constraint was looked at
        return super().sent_as(name)


class GenerateSampling(Body):
    """The fields of SamplingParams, under their own names."""

    n: Annotated[int, Field(ge=1, le=2**16)] = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Seed | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = 16
    min_tokens: Count = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsBody | None = None


class GenerateRequest(Body):
    """POST /generate: token ids (or text) in; token ids, log probabilities and speculation counts out."""

    model: str | None = None
    token_ids: list[Token] | None = None
    prompt: str | None = None
    sampling_params: GenerateSampling = GenerateSampling()
    stream: bool = False
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e6)] | None = None

    def sent_as(self, name: str) -> str:
        if name == "prompt" and self.token_ids is not None:
            return "token_ids"
        return f"sampling_params.{name}" if name in GenerateSampling.model_fields else name


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # default: yes for prompts, no for messages
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[Token]


class AbortRequest(Body):
    """POST /abort: the ids that responses carry."""

    request_id: str | None = None
    request_ids: list[str] | None = None
