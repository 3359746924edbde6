"""The other routes: models, health, tokenize, abort, /generate, /metrics."""

import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aspire.async_engine import EngineStats
from aspire.testing.fake_engine import FakeEngine

from .conftest import LiveServer, Serve


def test_models(serve: Serve) -> None:
    with serve(served_model_names=("small", "org/small")).client() as client:
        models = client.get("/v1/models").json()
        assert [model["id"] for model in models["data"]] == ["small", "org/small"]
        assert models["data"][0]["max_model_len"] == 4096
        assert client.get("/v1/models/org/small").json()["id"] == "org/small"
        assert client.get("/v1/models/other").status_code == 404
        answer = client.post("/v1/completions", json={"model": "org/small", "prompt": "x"}).json()
        assert answer["model"] == "org/small"


def test_version(shared: LiveServer) -> None:
    with shared.client() as client:
        assert re.fullmatch(r"\d+\.\d+\.\d+.*", client.get("/version").json()["version"])


def test_tokenize_and_back(shared: LiveServer) -> None:
    with shared.client() as client:
        answer = client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
        assert answer == {"count": 4, "max_model_len": 4096, "tokens": [256, 104, 195, 169],
                          "token_strs": ["<bos>", "<0x68>", "<0xC3>", "<0xA9>"]}
        assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "<bos>hé"}
        plain = client.post("/tokenize", json={"prompt": "h", "add_special_tokens": False}).json()
        assert plain["tokens"] == [104]
        chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
        assert bytes(chat["tokens"]).decode() == "<user>hi\n<assistant>"
        assert client.post("/tokenize", json={}).status_code == 400
        assert client.post("/detokenize", json={"tokens": [258]}).status_code == 400


def test_generate(shared: LiveServer) -> None:
    with shared.client() as client:
        answer = client.post("/generate", json={"token_ids": [97, 98, 99], "request_id": "r1", "sampling_params": {
            "max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1, "n": 2}}).json()
        assert answer["request_id"] == "gen-r1"
        assert [choice["token_ids"] for choice in answer["choices"]] == [[99, 98], [99, 98]]
        entry = answer["choices"][0]["logprobs"][0]
        assert (entry["token_id"], entry["logprob"], entry["top"]) == (99, -0.099, [[99, -0.099], [100, -1.099]])
        assert [None if entry is None else entry["token_id"] for entry in answer["prompt_logprobs"]] == [None, 98, 99]
        assert answer["choices"][0]["metrics"]["num_verifications"] == 1


def test_generate_stream_tells_accepted_drafts(shared: LiveServer) -> None:
    """Planted fault: cumulative instead of fresh counts."""
    with shared.client() as client:
        answer = client.post("/generate", json={"prompt": "abcdefghij", "stream": True,
                                                "sampling_params": {"max_tokens": 50}})
    events: list[Any] = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["text"] for event in events) == "jihgfedcba"
    assert sum(len(event["token_ids"]) for event in events) == 11
    assert sum(event["num_accepted"] for event in events) == events[-1]["metrics"]["num_accepted"] == 7


@pytest.mark.parametrize(("body", "param"), [
    ({}, "token_ids"),
    ({"prompt": "x", "token_ids": [1]}, "token_ids"),
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [999]}, "token_ids"),
    ({"token_ids": [1] * 5000}, "token_ids"),
    ({"token_ids": [1, -1]}, "token_ids[1]"),
    ({"prompt": "x" * 5000}, "prompt"),
    ({"prompt": "x", "sampling_params": {"max_tokens": 5000}}, "sampling_params.max_tokens"),
    ({"prompt": "x", "sampling_params": {"best_of": 2}}, "sampling_params.best_of"),
    ({"prompt": "x", "sampling_params": {"n": 99}}, "sampling_params.n"),
    ({"prompt": "x", "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    ({"prompt": "x", "sampling_params": {"temperature": -1.0}}, "sampling_params.temperature"),
    ({"prompt": "x", "sampling_params": {"structured_outputs": {"regex": "refuse"}}},
     "sampling_params.structured_outputs"),
], ids=lambda value: str(value)[:50])
def test_generate_refuses_by_name(shared: LiveServer, body: dict[str, Any], param: str) -> None:
    """Planted fault: errors of the engine shown under the engine's names."""
    with shared.client() as client:
        answer = client.post("/generate", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param, error
    assert error["message"]


def test_abort_by_id(serve: Serve) -> None:
    """By the id in the response, by the request_id of the body, by X-Request-Id. Planted fault: one prompt only."""
    server = serve(FakeEngine(step_seconds=0.005))
    body = {"prompt": ["a", "b"], "max_tokens": 3000, "ignore_eos": True}
    for given, fields, headers in (("cmpl-mine", {"request_id": "mine"}, {}), ("mine", {"request_id": "mine"}, {}),
                                   ("trace", {}, {"X-Request-Id": "trace"})):
        answers: list[Any] = []

        def ask(answers: list[Any], fields: dict[str, str], headers: dict[str, str]) -> None:
            with server.client() as client:
                answers.append(client.post("/v1/completions", json={**body, **fields}, headers=headers))
        thread = threading.Thread(target=ask, args=(answers, fields, headers))
        thread.start()
        with server.client() as client:
            while server.llm.num_live < 2:
                time.sleep(0.001)
            answer = client.post("/abort", json={"request_ids": [given, "nobody"]}).json()
        thread.join()
        assert answer == {"aborted": [given], "not_found": ["nobody"]}
        assert [choice["finish_reason"] for choice in answers[0].json()["choices"]] == ["abort", "abort"]
        server.wait_idle()


def scrape(server: LiveServer) -> dict[str, float]:
    with server.client() as client:
        text = client.get("/metrics").text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            values[sample.name + (str(sorted(labels.items())) if labels else "")] = sample.value
    return values


def test_metrics(serve: Serve) -> None:
    server = serve(FakeEngine(tokens_per_step=4))
    before = scrape(server)
    assert before["vllm:num_requests_running"] == 0
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "x" * 30, "max_tokens": 30})
        client.post("/v1/completions", json={"prompt": "xy", "max_tokens": 30})
        client.post("/v1/completions", json={"prompt": "xy", "max_tokens": -1})
    server.wait_idle()
    values = scrape(server)
    assert values["vllm:prompt_tokens_total"] == 31 + 3
    assert values["vllm:generation_tokens_total"] == 30 + 3
    assert values["vllm:time_to_first_token_seconds_count"] == 2
    assert values["vllm:e2e_request_latency_seconds_count"] == 2
    assert values["vllm:request_queue_time_seconds_count"] == 2
    assert values["vllm:request_success_total[('finished_reason', 'stop')]"] == 1
    assert values["vllm:request_success_total[('finished_reason', 'length')]"] == 1
    assert values["vllm:spec_decode_num_drafts_total"] == 8 + 1
    assert values["vllm:spec_decode_num_draft_tokens_total"] == 27
    assert values["vllm:spec_decode_num_accepted_tokens_total"] == 33 - 9
    assert values["vllm:spec_decode_num_accepted_tokens_per_pos_total[('position', '2')]"] == 9
    assert values["aspire:draft_length_count"] == 9
    assert values["aspire:http_responses_total[('route', '/v1/completions'), ('status', '200')]"] == 2
    assert values["aspire:http_responses_total[('route', '/v1/completions'), ('status', '400')]"] == 1
    assert values["vllm:kv_cache_usage_perc"] == 0


def test_metrics_of_host_memory(serve: Serve) -> None:
    """Planted fault: blocks that came back counted under the name of those that left."""

    class Offloading(FakeEngine):
        def stats(self) -> EngineStats:
            return replace(super().stats(), num_offloaded=7, num_restored=4, num_host_blocks=20, num_host_blocks_used=6)

    server = serve(Offloading())
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "abc"})
    server.wait_idle()
    values = scrape(server)
    names = ("blocks_offloaded_total", "blocks_restored_total", "blocks", "blocks_used")
    assert [values[f"aspire:kv_offload_{name}"] for name in names] == [7, 4, 20, 6]


def test_metrics_as_the_vllm_benchmark_reads_them(serve: Serve) -> None:
    """It adds up the last word of lines by substring, so a stray `_created` series would spoil its sums."""
    server = serve(FakeEngine(tokens_per_step=3))
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "abcdefgh", "max_tokens": 30})
    server.wait_idle()
    with server.client() as client:
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("vllm:spec_decode")]
    sums = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos", "num_accepted_tokens"), 0)
    positions: dict[int, int] = {}
    for line in lines:
        name = next(name for name in sums if name in line)  # the first one that fits, in its order
        value = int(float(line.split()[-1]))
        sums[name] += value
        if name == "num_accepted_tokens_per_pos":
            positions[int(line.split('position="')[1].split('"')[0])] = value
    assert sums == {"num_drafts": 3, "num_draft_tokens": 6, "num_accepted_tokens_per_pos": 6, "num_accepted_tokens": 6}
    assert positions == {0: 3, 1: 3}
    assert not any("_created" in line for line in lines)


def test_grafana_panels_ask_for_metrics_that_exist(serve: Serve) -> None:
    """Planted fault: a renamed counter."""
    import aspire.server

    server = serve(FakeEngine())
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "abcdef"})
        server.wait_idle()
        exposed = client.get("/metrics").text
    dashboard = json.loads((Path(aspire.server.__file__).parent / "grafana.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"]
             for name in re.findall(r"(?:vllm|aspire):[a-z0-9_]+", target["expr"])}
    assert len(asked) > 20
    # A fake engine predicts no step times.
    missing = {name for name in asked if f"\n{name}{{" not in exposed} - {"aspire:predicted_step_seconds"}
    assert not missing
