"""/v1/completions through the official client: whole, streamed, batches, echo, log probabilities, limits."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from aspire.request import SamplingParams
from aspire.testing.fake_engine import FakeEngine

from .conftest import LiveServer, Serve


@pytest.fixture
def api(shared: LiveServer) -> OpenAI:
    return OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0, timeout=20)


def test_whole(api: OpenAI) -> None:
    answer = api.completions.create(model="fake", prompt="hello wörld", max_tokens=50)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert [choice.text for choice in answer.choices] == ["dlröw olleh"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (13, 13)


def test_default_max_tokens_is_sixteen(api: OpenAI) -> None:
    answer = api.completions.create(model="fake", prompt="x" * 40)
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


def test_batches_and_n_keep_their_order(api: OpenAI) -> None:
    """Planted fault: numbering choices by arrival."""
    answer = api.completions.create(model="fake", prompt=["abcdefghijk", "xy", "pq" * 5], n=2, max_tokens=50)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == ["kjihgfedcba"] * 2 + ["yx"] * 2 + ["qpqpqpqpqp"] * 2


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]]], ids=["ids", "list of ids"])
def test_token_prompts(api: OpenAI, prompt: Any) -> None:
    answer = api.completions.create(model="fake", prompt=prompt, max_tokens=50)
    assert answer.choices[0].text == "ih"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2


def test_stream_adds_up_to_the_whole(api: OpenAI) -> None:
    """Planted fault: sending cumulative text."""
    texts = {0: "", 1: ""}
    ends: dict[int, str | None] = {}
    usage = None
    for chunk in api.completions.create(model="fake", prompt=["hello wörld", "a" * 30], max_tokens=20, stream=True,
                                        stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {0: "dlröw olleh", 1: "a" * 20}
    assert ends == {0: "stop", 1: "length"}
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (13 + 31, 13 + 20)


def test_stream_comes_in_pieces(serve: Serve) -> None:
    server = serve(FakeEngine(step_seconds=0.005))
    api = OpenAI(base_url=server.url + "/v1", api_key="none")
    chunks = list(api.completions.create(model="fake", prompt="abcdefghijklmnop", max_tokens=64, stream=True))
    assert len(chunks) >= 4


def test_continuous_usage(api: OpenAI) -> None:
    chunks = list(api.completions.create(
        model="fake", prompt="hello", max_tokens=20, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}))  # type: ignore[typeddict-unknown-key]
    assert all(chunk.usage is not None for chunk in chunks)
    assert chunks[-1].usage == chunks[-2].usage


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_stop_string_is_cut_and_named(api: OpenAI, stream: bool) -> None:
    """A stop string spanning two steps must not show its beginning. Planted fault: no held-back end."""
    answer = api.completions.create(model="fake", prompt="abcdefghij", max_tokens=50, stop=["fed", "zzz"],
                                    stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]  # type: ignore[union-attr]
    assert "".join(choice.text for choice in choices) == "jihg"
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == "fed"  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_echo_with_logprobs(api: OpenAI, stream: bool) -> None:
    """What lm-eval reads: token by token, prompt first. Planted fault: prompt and output swapped."""
    answer = api.completions.create(model="fake", prompt="abé", max_tokens=2, logprobs=2, echo=True, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]  # type: ignore[union-attr]
    assert "".join(choice.text for choice in choices).startswith("abé")
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    values = [value for part in parts for value in part.token_logprobs]
    tops = [top for part in parts for top in part.top_logprobs]
    assert tokens == ["<bos>", "a", "b", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xc3", "bytes:\\xa9"]
    assert values[0] is None
    assert values[1:3] == [-0.097, -0.098]
    assert tops[1] == {"a": -0.097, "b": -1.097}


def test_echo_survives_a_first_token_without_text(api: OpenAI) -> None:
    """Planted fault: the echo spent on a chunk that is not sent, because half a character shows nothing yet."""
    chunks = api.completions.create(model="fake", prompt="abé", max_tokens=2, echo=True, n=2, stream=True)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["abéé", "abéé"]


def test_echo_alone_with_no_tokens(api: OpenAI) -> None:
    answer = api.completions.create(model="fake", prompt=["ab", "xyz"], max_tokens=0, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["ab", "xyz"]
    assert answer.choices[1].logprobs is not None
    assert answer.choices[1].logprobs.tokens == ["<bos>", "x", "y", "z"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_return_token_ids(api: OpenAI) -> None:
    answer = api.completions.create(model="fake", prompt="ab", max_tokens=9, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == [98, 97, 257]  # type: ignore[attr-defined]
    assert answer.choices[0].prompt_token_ids == [256, 97, 98]  # type: ignore[attr-defined]


def test_every_sampling_field_reaches_the_engine(serve: Serve) -> None:
    """Planted fault: a field left out of sampling_params()."""
    seen: list[SamplingParams] = []

    def script(prompt: str, params: SamplingParams) -> str:
        seen.append(params)
        return "ok"
    server = serve(FakeEngine(script))
    fields = {"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "max_tokens": 12,
              "min_tokens": 2, "stop": "end", "stop_token_ids": [7], "ignore_eos": True,
              "include_stop_str_in_output": True, "skip_special_tokens": False, "presence_penalty": 0.5,
              "frequency_penalty": -0.5, "repetition_penalty": 1.5, "bad_words": ["bad"], "logprobs": 3}
    body = {"prompt": "x", "logit_bias": {"65": 1.5}, "guided_choice": ["a", "b"], **fields}
    with server.client() as client:
        assert client.post("/v1/completions", json=body).status_code == 200
    [params] = seen
    for name, value in fields.items():
        got = getattr(params, name)
        assert (list(got) if isinstance(value, list) else got) == value, name
    assert params.logit_bias == {65: 1.5}
    assert params.structured_outputs is not None
    assert params.structured_outputs.choice == ("a", "b")


def test_server_defaults_apply_where_the_request_is_silent(serve: Serve) -> None:
    seen: list[SamplingParams] = []
    server = serve(FakeEngine(lambda prompt, params: seen.append(params) or "ok"),
                   default_sampling={"temperature": 0.25, "top_k": 9})
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "x", "top_k": 3})
    assert (seen[0].temperature, seen[0].top_k) == (0.25, 3)


@pytest.mark.parametrize(("fields", "param"), [
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"min_tokens": 60}, "min_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias"),
    ({"logit_bias": {"999": 1.0}}, "logit_bias"),
    ({"logit_bias": {"7": 1000.0}}, "logit_bias"),
    ({"seed": 2**64}, "seed"),
    ({"presence_penalty": 3.0}, "presence_penalty"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "x" * 4096}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 4}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "poem"}}, "response_format.type"),
    ({"guided_regex": "a{1,9999}"}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"maxItems": 100000}}, "guided_json"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
    ({"guided_regex": "refuse"}, "guided_regex"),
    ({"guided_regex": "refuse", "stream": True}, "guided_regex"),
    ({"structured_outputs": {"regex": "refuse"}}, "structured_outputs"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt[0]"),
    ({"prompt": [[1], [-2]]}, "prompt[1][0]"),
    ({"stop": ["x", 3]}, "stop[1]"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"request_id": "bad id!"}, "request_id"),
    ({"timeout": -1.0}, "timeout"),
], ids=lambda value: str(value)[:40])
def test_wrong_fields_are_refused_by_name(shared: LiveServer, fields: dict[str, Any], param: str) -> None:
    """Planted fault: extra="ignore" in Body."""
    with shared.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 50, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    shared.wait_idle()


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"suffix": None}, {"use_beam_search": False}, {"user": "me"}],
                         ids=str)
def test_neutral_values_are_accepted(shared: LiveServer, fields: dict[str, Any]) -> None:
    with shared.client() as client:
        assert client.post("/v1/completions", json={"prompt": "x", **fields}).status_code == 200


@pytest.mark.parametrize(("fields", "begin"), [
    ({"guided_regex": "refuse"}, "guided_regex must be"),
    ({"structured_outputs": {"regex": "refuse"}}, "structured_outputs.regex must be")], ids=["guided", "structured"])
def test_messages_speak_of_the_field_that_was_sent(shared: LiveServer, fields: dict[str, Any], begin: str) -> None:
    """Planted fault: "guided_regex.regex", the engine's part left behind the client's name."""
    with shared.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "x", **fields})
    assert answer.json()["error"]["message"].startswith(begin)


def test_unknown_model(api: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        api.completions.create(model="gpt-none", prompt="x")
    assert caught.value.code == "model_not_found"
