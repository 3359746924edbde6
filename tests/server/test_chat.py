"""/v1/chat/completions through the official client: messages, reasoning, tools, constraints, log probabilities."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI

from aspire.request import SamplingParams
from aspire.testing.fake_engine import FakeEngine

from .conftest import LiveServer, Serve

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
    for name in ("get_weather", "get_time")]
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def api(shared: LiveServer) -> OpenAI:
    return OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0, timeout=20)


@pytest.fixture
def saying(serve: Serve) -> Callable[..., OpenAI]:
    """A client of a server whose model says this."""
    def start(reply: str, **config: Any) -> OpenAI:
        server = serve(FakeEngine(lambda prompt, params: reply, step_seconds=0.001), **config)
        return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20)
    return start


def streamed(chunks: Any) -> dict[str, Any]:
    """Put a stream together the way clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None, "pieces": 0}
    for chunk in chunks:
        for choice in chunk.choices:
            message["pieces"] += 1
            assert message["finish"] is None, "nothing comes after the finish reason"
            message["finish"] = choice.finish_reason
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                known = message["calls"].setdefault(call.index, {"name": "", "arguments": "", "id": call.id})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
    return message


def test_whole_answer_and_template(api: OpenAI) -> None:
    answer = api.chat.completions.create(model="fake", messages=[
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "<system>be brief\n<user>ab\n<assistant>"[::-1]
    assert answer.choices[0].finish_reason == "stop"


def test_stream_equals_whole(api: OpenAI) -> None:
    whole = api.chat.completions.create(model="fake", messages=HI)
    message = streamed(api.chat.completions.create(model="fake", messages=HI, stream=True))
    assert message["content"] == whole.choices[0].message.content
    assert message["finish"] == "stop"


def test_n_outputs(api: OpenAI) -> None:
    answer = api.chat.completions.create(model="fake", messages=HI, n=3, max_completion_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_logprobs(api: OpenAI) -> None:
    answer = api.chat.completions.create(model="fake", messages=HI, logprobs=True, top_logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == [">", "t", "n"]
    assert logprobs.content[1].bytes == [116]
    assert [top.token for top in logprobs.content[1].top_logprobs] == ["t", "u"]
    chunks = api.chat.completions.create(model="fake", messages=HI, logprobs=True, max_tokens=3, stream=True)
    entries = [entry for chunk in chunks for choice in chunk.choices if choice.logprobs
               for entry in choice.logprobs.content or ()]
    assert [entry.token for entry in entries] == [">", "t", "n"]


def test_template_arguments(api: OpenAI) -> None:
    answer = api.chat.completions.create(model="fake", messages=HI, extra_body={
        "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False})
    assert answer.choices[0].message.content == "<user>hi\n[enable_thinking=False]"[::-1]


def test_past_calls_reach_the_template(serve: Serve) -> None:
    engine = FakeEngine()
    seen: list[Any] = []
    template = engine.tokenizer.apply_chat_template
    engine.tokenizer.apply_chat_template = (  # type: ignore[method-assign]
        lambda messages, **options: (seen.append(messages), template(messages, **options))[1])
    api = OpenAI(base_url=serve(engine).url + "/v1", api_key="none")
    api.chat.completions.create(model="fake", messages=[
        {"role": "developer", "content": "x"}, *HI,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"}])
    assert [message["role"] for message in seen[0]] == ["system", "user", "assistant", "tool"]
    assert seen[0][2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert seen[0][3]["tool_call_id"] == "c1"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_reasoning_is_split(saying: Callable[..., OpenAI], stream: bool) -> None:
    api = saying("<think>\nhm, <b>two</b>\n</think>\n\nIt is 2.")
    answer = api.chat.completions.create(model="fake", messages=HI, stream=stream)
    if stream:
        message = streamed(answer)
        got = message["reasoning"], message["content"]
    else:
        said = answer.choices[0].message  # type: ignore[union-attr]
        got = said.reasoning_content, said.content  # type: ignore[union-attr]
    assert got == ("hm, <b>two</b>\n", "It is 2.")


def test_reasoning_stays_in_the_text_when_off(saying: Callable[..., OpenAI]) -> None:
    api = saying("<think>x</think>y", reasoning_format="none")
    assert api.chat.completions.create(model="fake", messages=HI).choices[0].message.content == "<think>x</think>y"


TWO_CALLS = ('Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "a } \\" </tool_call> b"}}\n'
             '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>')


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_hermes_tool_calls(saying: Callable[..., OpenAI], stream: bool) -> None:
    """Planted fault: ending a call at the first closing tag, which here sits inside a string."""
    api = saying(TWO_CALLS)
    answer = api.chat.completions.create(model="fake", messages=HI, tools=TOOLS, stream=stream)
    if stream:
        message = streamed(answer)
        calls = [(call["name"], call["arguments"]) for call in message["calls"].values()]
        content, finish = message["content"], message["finish"]
        assert len({call["id"] for call in message["calls"].values()}) == 2
        assert message["pieces"] > 8, "arguments come in pieces"
    else:
        choice = answer.choices[0]  # type: ignore[union-attr]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        content, finish = choice.message.content, choice.finish_reason
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("get_weather", {"city": 'a } " </tool_call> b'}), ("get_time", {"city": "Rome"})]
    assert content.strip() == "Let me see."
    assert finish == "tool_calls"


def test_one_call_when_parallel_calls_are_off(saying: Callable[..., OpenAI]) -> None:
    answer = saying(TWO_CALLS).chat.completions.create(model="fake", messages=HI, tools=TOOLS,
                                                       parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["get_weather"]


def test_llama_calls(saying: Callable[..., OpenAI]) -> None:
    api = saying('<|python_tag|>{"name": "get_time", "parameters": {"city": "Rome"}}', tool_format="llama3_json")
    message = streamed(api.chat.completions.create(model="fake", messages=HI, tools=TOOLS, stream=True))
    assert message["calls"][0]["name"] == "get_time"
    assert json.loads(message["calls"][0]["arguments"]) == {"city": "Rome"}
    assert message["content"] == ""


def test_tool_choice_none_hides_the_tools(saying: Callable[..., OpenAI]) -> None:
    answer = saying(TWO_CALLS).chat.completions.create(model="fake", messages=HI, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == TWO_CALLS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=str)
def test_forced_calls_are_constrained(serve: Serve, choice: Any) -> None:
    """The grammar of a forced call is derived from the tools. Planted fault: no constraint on the engine's params."""
    named = choice != "required"
    seen: list[SamplingParams] = []
    reply = '{"city": "Rome"}' if named else '[{"name": "get_time", "parameters": {"city": "Rome"}}]'
    engine = FakeEngine(lambda prompt, params: seen.append(params) or reply)
    api = OpenAI(base_url=serve(engine).url + "/v1", api_key="none", max_retries=0)
    answer = api.chat.completions.create(model="fake", messages=HI, tools=TOOLS, tool_choice=choice)
    [call] = answer.choices[0].message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {"city": "Rome"})
    assert answer.choices[0].finish_reason == ("stop" if named else "tool_calls")
    assert seen[0].structured_outputs is not None
    schema: Any = seen[0].structured_outputs.json
    assert (schema == TOOLS[1]["function"]["parameters"]) if named else (schema["type"] == "array")
    message = streamed(api.chat.completions.create(model="fake", messages=HI, tools=TOOLS, tool_choice=choice,
                                                   stream=True))
    assert json.loads(message["calls"][0]["arguments"]) == {"city": "Rome"}


def test_json_schema_reaches_the_engine(serve: Serve) -> None:
    seen: list[SamplingParams] = []
    api = OpenAI(base_url=serve(FakeEngine(lambda p, params: seen.append(params) or "{}")).url + "/v1", api_key="x")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    api.chat.completions.create(model="fake", messages=HI, response_format={
        "type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}})
    api.chat.completions.create(model="fake", messages=HI, response_format={"type": "json_object"})
    api.chat.completions.create(model="fake", messages=HI, response_format={"type": "text"})
    constraints = [params.structured_outputs for params in seen]
    assert constraints[0] is not None
    assert constraints[0].json == schema
    assert constraints[1] is not None
    assert constraints[1].json_object
    assert constraints[2] is None


@pytest.mark.parametrize(("fields", "param"), [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"maxItems": 10**6}}}},
     "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maxItems": 10**6}}}],
      "tool_choice": "required"}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools[0].function.name"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"surprise": 1}, "surprise"),
], ids=lambda value: str(value)[:40])
def test_wrong_fields_are_refused_by_name(shared: LiveServer, fields: dict[str, Any], param: str) -> None:
    with shared.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_tools_without_a_known_format_are_refused(saying: Callable[..., OpenAI]) -> None:
    api = saying("x", tool_format="none")
    with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
        api.chat.completions.create(model="fake", messages=HI, tools=TOOLS)


def test_closing_a_stream_cancels_the_request(serve: Serve) -> None:
    server = serve(FakeEngine(step_seconds=0.005))
    api = OpenAI(base_url=server.url + "/v1", api_key="none")
    stream = api.chat.completions.create(model="fake", messages=HI, stream=True, extra_body={"ignore_eos": True})
    for _ in range(4):
        next(iter(stream))
    assert server.llm.num_live == 1
    stream.close()
    server.wait_idle(2)
    assert server.llm.latency.finished.get("length", 0) == 0


def test_model_without_chat_template(serve: Serve) -> None:
    engine = FakeEngine()
    engine.tokenizer.chat_template = ""
    with serve(engine).client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": HI})
    assert answer.status_code == 400
    assert "--chat-template" in answer.json()["error"]["message"]
