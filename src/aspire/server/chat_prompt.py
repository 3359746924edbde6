"""From a conversation to the text of a prompt, through the model's chat template."""

import json

import jinja2

from aspire.server.errors import bad_request
from aspire.server.protocol import ChatCompletionRequest, ChatMessage, TokenizeRequest, ToolDefinition
from aspire.server.service import Service

RESERVED = ("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message",
            "chat_template", "documents", "return_tensors", "return_dict", "padding", "truncation", "max_length",
            "return_assistant_tokens_mask", "tokenizer_kwargs")


def chat_prompt(service: Service, body: ChatCompletionRequest | TokenizeRequest, messages: list[ChatMessage],
                tools: list[ToolDefinition] | None) -> str:
    """Raises ApiError for a conversation that the template cannot express."""
    extra = body.chat_template_kwargs or {}
    for name in extra:
        if name in RESERVED:
            raise bad_request(f"chat_template_kwargs must not set {name}", "chat_template_kwargs")
    template = service.config.chat_template
    if template is None and not getattr(service.llm.tokenizer, "chat_template", None):
        raise bad_request("the model has no chat template; start the server with --chat-template, or use "
                          "/v1/completions", "messages")
    if template is not None:
        extra = {**extra, "chat_template": template}
    continues = body.continue_final_message
    if continues and body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise bad_request("continue_final_message and add_generation_prompt exclude each other",
                          "continue_final_message")
    try:
        return str(service.llm.tokenizer.apply_chat_template(
            [_message(message) for message in messages], tokenize=False,
            tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
            add_generation_prompt=body.add_generation_prompt and not continues, continue_final_message=continues,
            **extra))
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError,
            RecursionError) as error:
        raise bad_request(f"the chat template refused the conversation: {error}", "messages") from error


def _message(message: ChatMessage) -> dict[str, object]:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    made: dict[str, object] = {"role": "system" if message.role == "developer" else message.role,
                               "content": content if content is not None else ""}
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
            for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            made[name] = value
    return made


def _arguments(text: str) -> object:
    """Templates want past arguments as an object."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
