"""The official Python client drives every route; test_chat.py and test_completions.py go into those two."""

from typing import Any

import pytest
from openai import OpenAI

from aspire.testing.fake_engine import FakeEngine

from .conftest import LiveServer, Serve


@pytest.fixture
def live(serve: Serve) -> LiveServer:
    return serve(FakeEngine(step_seconds=0.002), api_keys=("key",))


def ask(api: OpenAI, path: str) -> Any:
    """A request to a route, through the client."""
    posts: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "hé"}, "/detokenize": {"tokens": [104, 105]},
        "/generate": {"token_ids": [97, 98], "sampling_params": {"max_tokens": 2, "logprobs": 1}},
        "/abort": {"request_id": "nobody"}, "/v1/completions": {"prompt": "ab", "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}}
    if path in posts:
        return api.post(path, cast_to=object, body=posts[path])
    return api.get(path.replace("{name}", "fake"), cast_to=str if path == "/metrics" else object)


def test_every_route(live: LiveServer) -> None:
    """Planted fault: /detokenize leaves the first token out."""
    api = OpenAI(base_url=live.url, api_key="key", max_retries=0, timeout=20)
    paths = api.get("/openapi.json", cast_to=object)["paths"]
    answers = {path: ask(api, path) for path in paths}
    assert answers["/tokenize"]["tokens"] == [256, *"hé".encode()]
    assert answers["/detokenize"] == {"prompt": "hi"}
    [choice] = answers["/generate"]["choices"]
    assert choice["token_ids"] == [98, 97]
    assert len(choice["logprobs"]) == 2
    assert answers["/abort"] == {"aborted": [], "not_found": ["nobody"]}
    assert answers["/v1/completions"]["choices"][0]["text"] == "ba"
    assert len(answers["/v1/chat/completions"]["choices"][0]["message"]["content"]) == 2
    assert answers["/v1/models"]["data"][0]["id"] == answers["/v1/models/{name}"]["id"] == "fake"
    assert answers["/health"] == {"status": "ok"}
    assert answers["/ready"] == {"status": "ready"}
    assert answers["/version"]["version"]
    assert "vllm:spec_decode_num_drafts_total" in answers["/metrics"]


def test_abort_by_the_id_of_a_stream(live: LiveServer) -> None:
    """Planted fault: ids found without their prefix only."""
    api = OpenAI(base_url=live.url + "/v1", api_key="key", max_retries=0, timeout=20)
    routes = api.with_options(base_url=live.url)
    reasons = []
    for chunk in api.completions.create(model="fake", prompt="x", max_tokens=3000, stream=True,
                                        extra_body={"ignore_eos": True}):
        if not reasons:
            assert routes.post("/abort", cast_to=object, body={"request_id": chunk.id})["aborted"] == [chunk.id]
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "abort"
    live.wait_idle()
