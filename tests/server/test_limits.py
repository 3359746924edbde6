"""Keys, sizes, queues, content types, cross-origin rules, logs."""

import gzip
import json
import logging
import socket
import threading
import time
from typing import Any

import pytest

from aspire.async_engine import AsyncConfig
from aspire.server.config import ServerConfig
from aspire.server.run import listen
from aspire.testing.fake_engine import FakeEngine

from .conftest import LiveServer, Serve

LONG = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True}


def test_keys(serve: Serve) -> None:
    """Planted fault: guarding /v1 only, so that /generate is open."""
    server = serve(api_keys=("first", "second"))
    guarded = [("GET", "/v1/models"), ("GET", "/openapi.json"), ("POST", "/v1/completions"),
               ("POST", "/v1/chat/completions"), ("POST", "/generate"), ("POST", "/tokenize"),
               ("POST", "/detokenize"), ("POST", "/abort"), ("GET", "/nowhere")]
    with server.client() as client:
        for method, path in guarded:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"},
                            {"Authorization": "Basic first"}, {"Authorization": "Bearer"}):
                answer = client.request(method, path, headers=headers, json={})
                assert answer.status_code == 401, path
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        for key in ("first", "second"):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert client.get(path).status_code == 200


def test_body_size(serve: Serve) -> None:
    """Both announced and chunked bodies. Planted fault: trusting Content-Length."""
    server = serve(max_body_bytes=1000)
    body = json.dumps({"prompt": "x" * 2000}).encode()
    headers = {"Content-Type": "application/json"}
    with server.client() as client:
        assert client.post("/v1/completions", content=body, headers=headers).status_code == 413
        pieces = (body[i:i + 100] for i in range(0, len(body), 100))
        assert client.post("/v1/completions", content=pieces, headers=headers).status_code == 413
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_slow_body(serve: Serve) -> None:
    server = serve(read_timeout=0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                       b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in client.recv(4096).split(b"\r\n")[0] + b" "


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_content_type(shared: LiveServer, content_type: str) -> None:
    """A web page of another origin can post text without asking; it must not reach the engine."""
    with shared.client() as client:
        headers = {"Content-Type": content_type} if content_type else {}
        assert client.post("/v1/completions", content=b'{"prompt":"x"}', headers=headers).status_code == 415


def test_packed_bodies_are_refused_as_such(shared: LiveServer) -> None:
    """Planted fault: taken for broken JSON."""
    with shared.client() as client:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        answer = client.post("/v1/completions", content=gzip.compress(b'{"prompt":"x"}'), headers=headers)
        assert answer.status_code == 415
        assert "gzip" in answer.json()["error"]["message"]
        headers["Content-Encoding"] = "identity"
        assert client.post("/v1/completions", content=b'{"prompt":"x"}', headers=headers).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt":"\\ud800"}',
                                  b'{"prompt":"\xed\xa0\x80"}', '{"prompt":"\\ud800"}'.encode("utf-16"),
                                  '{"prompt":"x"}'.encode("utf-16-le"),
                                  b'{"prompt":' + b"[" * 100000, b'{"prompt":[' + b"9" * 5000 + b"]}",
                                  b'{"prompt":"x","temperature":NaN}', b'{"prompt":"x","temperature":1e999}'],
                         ids=lambda body: str(body[:24]))
def test_broken_bodies(shared: LiveServer, body: bytes) -> None:
    """Planted fault: bytes given to json, which takes UTF-16 and lone surrogates in UTF-8, so that prompts were not
    encodable and the answer was 500."""
    with shared.client() as client:
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert "Traceback" not in answer.text


def test_what_is_no_object_is_told_so(shared: LiveServer) -> None:
    """Planted fault: naming our own class."""
    with shared.client() as client:
        answer = client.post("/v1/chat/completions", content=b"[1]", headers={"Content-Type": "application/json"})
        assert answer.json()["error"]["message"] == "the body must be a JSON object"
        with_mark = b'\xef\xbb\xbf{"prompt":"x"}'
        answer = client.post("/v1/completions", content=with_mark, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200


def test_paired_surrogates_are_fine(shared: LiveServer) -> None:
    with shared.client() as client:
        answer = client.post("/tokenize", content=b'{"prompt":"\\ud83d\\ude00"}',
                             headers={"Content-Type": "application/json"})
    assert answer.json()["tokens"] == [256, *"😀".encode()]


def test_queue_limit_gives_429(serve: Serve) -> None:
    server = serve(FakeEngine(step_seconds=0.01), async_config=AsyncConfig(max_live=2))
    with server.client() as client, client.stream("POST", "/generate", json={
            "prompt": "x", "stream": True, "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}), \
            client.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
        answer = client.post("/v1/completions", json=LONG)
        assert answer.status_code == 429
        assert answer.headers["Retry-After"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        batch = client.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert batch.status_code == 429
    server.wait_idle()


def test_a_batch_is_accepted_whole_or_not_at_all(serve: Serve) -> None:
    """Planted fault: leaving the first prompts running when a later one is refused."""
    server = serve(FakeEngine(step_seconds=0.01), async_config=AsyncConfig(max_live=3))
    with server.client() as client, client.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
        assert client.post("/v1/completions", json={**LONG, "prompt": ["a", "b", "c"]}).status_code == 429
        assert server.llm.num_live == 1
    server.wait_idle()


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/completions", {"prompt": ["a", "b", "c"]}, "prompt"),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, "prompt"),
    ("/v1/completions", {"prompt": "a", "n": 3}, "n"),
    ("/v1/completions", {"prompt": "a", "n": 3, "stream": True}, "n"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 3}, "n"),
    ("/generate", {"prompt": "a", "sampling_params": {"n": 3}}, "sampling_params.n")], ids=str)
def test_what_can_never_fit_is_a_mistake_not_a_full_queue(serve: Serve, path: str, fields: dict[str, Any],
                                                          param: str) -> None:
    """Trying again, as 429 advises, would not help. Planted fault: the queue's 429 for all."""
    server = serve(FakeEngine(step_seconds=0.01), async_config=AsyncConfig(max_live=2))
    with server.client() as client:
        answer = client.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "at most 2" in error["message"]
    assert str(3 if len(fields.get("prompt", "a")) != 2 else 4) in error["message"]


def test_outputs_count_against_the_queue_limit(serve: Serve) -> None:
    """One request with n outputs holds as much as n requests. Planted fault: counting requests."""
    server = serve(FakeEngine(step_seconds=0.01), async_config=AsyncConfig(max_live=4))
    with server.client() as client, client.stream("POST", "/v1/completions", json={**LONG, "n": 3, "stream": True}):
        assert client.post("/v1/completions", json={**LONG, "n": 2}).status_code == 429
        assert client.post("/v1/completions", json={"prompt": "ab"}).status_code == 200
    server.wait_idle()


def test_output_limits(serve: Serve) -> None:
    server = serve(max_output_tokens=20, max_n=2)
    messages = [{"role": "user", "content": "y" * 100}]
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 21}).status_code == 400
        assert client.post("/v1/completions", json={"prompt": "x", "n": 3}).status_code == 400
        answer = client.post("/v1/chat/completions", json={"messages": messages}).json()
        assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize(("fields", "param"), [
    ({"prompt": ["a", "b", "c"]}, "prompt"), ({"prompt": []}, "prompt"),
    ({"prompt": "a", "guided_regex": "a" * 51}, "guided_regex"),
    ({"prompt": "a", "guided_json": {"title": "a" * 50}}, "guided_json"),
    ({"prompt": "a", "guided_choice": ["a" * 30, "b" * 30]}, "guided_choice")], ids=str)
def test_prompts_and_grammars_have_limits(serve: Serve, fields: dict[str, Any], param: str) -> None:
    server = serve(max_prompts=2, max_grammar_bytes=50)
    with server.client() as client:
        answer = client.post("/v1/completions", json=fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert client.post("/v1/completions", json={"prompt": ["a", "b"], "guided_regex": "a" * 50}).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_timeout(serve: Serve, stream: bool) -> None:
    """Per request and per server; the smaller one counts."""
    server = serve(FakeEngine(step_seconds=0.02), request_timeout=0.3)
    with server.client() as client:
        for fields in ({}, {"timeout": 0.1}, {"timeout": 100.0}):
            begun = time.monotonic()
            answer = client.post("/v1/completions", json={**LONG, "stream": stream, **fields})
            assert time.monotonic() - begun < 1.5
            if stream:
                events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
                assert events[-1]["error"]["code"] == "timeout"
            else:
                assert answer.status_code == 408
    server.wait_idle()


def test_duplicate_request_id(serve: Serve) -> None:
    server = serve(FakeEngine(step_seconds=0.01))
    body = {**LONG, "request_id": "same"}
    with server.client() as client, client.stream("POST", "/v1/completions", json={**body, "stream": True}):
        assert client.post("/v1/completions", json=body).status_code == 409
    server.wait_idle()


def test_cors_is_off_unless_asked_for(serve: Serve) -> None:
    ask = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST",
           "Access-Control-Request-Headers": "content-type"}
    with serve().client() as client:
        assert "access-control-allow-origin" not in client.options("/v1/completions", headers=ask).headers
        assert "access-control-allow-origin" not in client.get("/v1/models", headers=ask).headers
    with serve(allowed_origins=("http://page.example",)).client() as client:
        allowed = client.options("/v1/completions", headers=ask)
        assert allowed.headers["access-control-allow-origin"] == "http://page.example"


def test_request_ids_are_echoed_and_logged_but_prompts_are_not(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serve().client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a secret prompt"}, headers={"X-Request-Id": "trace-7"})
        assert answer.headers["X-Request-Id"] == "trace-7"
        assert answer.json()["id"] == "cmpl-trace-7"
        evil = client.get("/health", headers={"X-Request-Id": "bad id"})
        assert evil.headers["X-Request-Id"] != "bad id"
        client.post("/v1/completions", json={"prompt": "a secret prompt", "temperature": -1.0})
    assert "trace-7" in caplog.text
    assert "secret" not in caplog.text
    with serve(log_prompts=True).client() as client:
        client.post("/v1/completions", json={"prompt": "a secret prompt"})
    assert "secret" in caplog.text


def test_unforeseen_errors_show_no_traceback(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()

    def broken(*args: object, **options: object) -> list[int]:
        raise LookupError("a detail of ours")
    server.llm.tokenizer.encode = broken
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error"
    assert "a detail of ours" in caplog.text


def test_methods_and_paths(shared: LiveServer) -> None:
    with shared.client() as client:
        answer = client.get("/v1/completions")
        assert answer.status_code == 405
        assert answer.headers["Allow"] == "POST"
        assert "POST" in answer.json()["error"]["message"]
        answer = client.post("/v1/embeddings", json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"
        assert "/v1/embeddings" in answer.json()["error"]["message"]


def test_many_idle_connections_do_not_block(shared: LiveServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", shared.port)) for _ in range(100)]
    with shared.client() as client:
        assert client.get("/health").status_code == 200
    for connection in idle:
        connection.close()


def test_long_prompts_do_not_stall_streams(serve: Serve) -> None:
    """Tokenizing happens off the event loop. Planted fault: encoding on the loop."""
    engine = FakeEngine(step_seconds=0.002)
    encode = engine.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 2500:
            time.sleep(0.5)
        return encode(text, add_special_tokens)
    engine.tokenizer.encode = slow  # type: ignore[method-assign]
    server = serve(engine)
    with server.client() as client:
        busy = threading.Thread(target=lambda: server.client().post("/tokenize", json={"prompt": "x" * 3000}))
        busy.start()
        time.sleep(0.05)
        begun = time.monotonic()
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
        assert time.monotonic() - begun < 0.4
        busy.join()


def test_config_names_what_is_wrong() -> None:
    for fields, text in (({"max_n": 0}, "max_n"), ({"port": 70000}, "port"), ({"api_keys": (" ",)}, "api_keys"),
                         ({"tool_format": "x"}, "tool_format"), ({"shutdown_grace": -1}, "shutdown_grace")):
        with pytest.raises(ValueError, match=text):
            ServerConfig(**fields)  # type: ignore[arg-type]


def test_small_events_are_sent_at_once() -> None:
    """Planted fault: TCP_NODELAY left to asyncio, which does not set it here: 40 ms a request on kept connections."""
    listener = listen(ServerConfig(port=0))
    with socket.create_connection(listener.getsockname()), listener:
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_told(shared: LiveServer) -> None:
    with pytest.raises(ValueError, match=str(shared.port)):
        listen(ServerConfig(port=shared.port))
