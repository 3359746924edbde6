"""LLM: the offline API. Prompts in, finished outputs out, with a progress bar; names follow vLLM."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from typing_extensions import Unpack

from aspire.config import EngineConfig, EngineOptions
from aspire.engine import Engine
from aspire.progress import Progress, no_progress, terminal_progress
from aspire.request import RequestOutput, SamplingParams
from aspire.stats import Observer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """An engine and its tokenizer behind two calls, `generate` and `chat`.

    LLM("smollm2-135m", policy="aspire").generate(["..."], SamplingParams(max_tokens=64))
    Options are those of `EngineOptions`. Raises ValueError for anything a user can get wrong.
    """

    def __init__(self, model: str, *, observers: Sequence[Observer] = (), show_progress: bool = False,
                 **options: Unpack[EngineOptions]) -> None:
        from aspire.build import build_engine

        config = EngineConfig.from_options(model, options)
        progress = terminal_progress if show_progress else no_progress
        self.engine: Engine = build_engine(config, observers=observers, progress=progress)
        self._next_id = 0

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer; ValueError if the model has none."""
        if self.engine.facts.tokenizer is None:
            raise ValueError(f"{self.engine.facts.name} has no tokenizer: pass prompts as token ids")
        return self.engine.facts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own generation defaults, as `generate` uses them when no params are given."""
        return self.engine.default_params

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Outputs in the order of the prompts. A prompt is text, token ids, or {"prompt": ...} or
        {"prompt_token_ids": ...}. All prompts are checked before any runs; Ctrl-C raises KeyboardInterrupt after
        aborting what is unfinished (see `stream` for the outputs finished so far)."""
        finished = list(self.stream(prompts, sampling_params, use_tqdm=use_tqdm))
        return [output for _, output in sorted(finished, key=lambda pair: pair[0])]

    def stream(self, prompts: Prompt | Sequence[Prompt],
               sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
               use_tqdm: bool = True) -> Iterator[tuple[int, RequestOutput]]:
        """(index, output) of each prompt as it finishes."""
        requests = self._prepare(prompts, sampling_params)
        index_of: dict[str, int] = {}
        show: Progress = terminal_progress if use_tqdm else no_progress
        try:
            for index, (text, tokens, params) in enumerate(requests):
                request_id = str(self._next_id)
                self._next_id += 1
                try:
                    self.engine.add(request_id, tokens, params, prompt=text)
                except ValueError as error:
                    raise ValueError(f"prompts[{index}]: {error}") from error
                index_of[request_id] = index
            with show("Generating", len(requests)) as advance:
                while index_of:
                    for group in self.engine.advance():
                        if group.is_finished:
                            advance(1)
                            yield index_of.pop(group.request_id), group.render()
        finally:
            for request_id in index_of:
                self.engine.abort(request_id)

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             tools: Sequence[Mapping[str, Any]] | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """One conversation or a list of them, through the model's chat template, which also gets `tools` and the
        further variables of chat_template_kwargs. Raises ValueError for what the template refuses."""
        if not messages or isinstance(messages, str):
            raise ValueError(f"messages must be a list of at least one message, got {messages!r}")
        if tools is not None:
            chat_template_kwargs = {**(chat_template_kwargs or {}), "tools": list(tools)}
        several = not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        prompts = [self.render_chat(one, chat_template_kwargs=chat_template_kwargs) for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(self, messages: Sequence[Message], *,
                    chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation with the prompt for the assistant's turn."""
        tokenizer = self.get_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"{self.engine.facts.name} has no chat template: use generate with a plain prompt")
        options = {"add_generation_prompt": True, **(chat_template_kwargs or {}), "tokenize": False}
        try:
            text = tokenizer.apply_chat_template(list(messages), **options)
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"messages do not fit the chat template: {error}") from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prepare(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None,
                 ) -> list[tuple[str | None, list[int], SamplingParams]]:
        listed: list[Any]
        if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            listed = [prompts]
        else:
            listed = list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = [sampling_params] * len(listed) if isinstance(sampling_params, SamplingParams) else sampling_params
        if len(params) != len(listed):
            raise ValueError(f"sampling_params must be one or as many as prompts ({len(listed)}), got {len(params)}")
        return [(*self._tokens(index, prompt), chosen)
                for index, (prompt, chosen) in enumerate(zip(listed, params, strict=True))]

    def _tokens(self, index: int, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise ValueError(f"prompts[{index}] must have the key prompt or prompt_token_ids, "
                                 f"got {sorted(prompt)}")
            return self._tokens(index, prompt["prompt"])
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError(f"prompts[{index}]: prompt must be non-empty, got ''")
            return prompt, list(self.get_tokenizer()(prompt)["input_ids"])
        return None, list(prompt)
