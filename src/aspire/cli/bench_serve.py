"""`aspire bench serve`: load a running server and report latencies; flags as `vllm bench serve`."""

import asyncio
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from aspire.cli.options import ADDRESS_FLAGS, SAMPLING_FLAGS, Flag, Group, select, with_flags

TARGET_FLAGS = (
    Flag("backend", str, "openai (completions; vllm is the same) or openai-chat", "NAME"),
    Flag("base_url", str, "Server; default http://HOST:PORT", "URL"),
    *ADDRESS_FLAGS,
    Flag("endpoint", str, "Path; default by the backend", "PATH"),
    Flag("model", str, "Default the server's first", "NAME"),
    Flag("served_model_name", str, "Name to ask for, instead of --model", "NAME"),
    Flag("api_key", str, "Key to send", "KEY"),
)
DATA_FLAGS = (
    Flag("dataset_name", str, "random (default), custom or sharegpt", "NAME"),
    Flag("dataset_path", str, "JSON lines with \"prompt\" (custom), or a sharegpt file", "FILE"),
    Flag("num_prompts", int, "Default 1000", "N"),
    Flag("random_input_len", int, "Prompt tokens; default 1024", "N"),
    Flag("random_output_len", int, "Output tokens; default 128", "N"),
    Flag("random_range_ratio", float, "Lengths vary by this share of themselves; default 0", "SHARE"),
    Flag("random_prefix_len", int, "Tokens that all prompts share, besides; default 0", "N"),
    Flag("random_vocab_size", int, "Token ids are drawn below this; default 256", "N"),
    Flag("output_len", int, "Output tokens for custom and sharegpt", "N"),
    Flag("custom_output_len", int, "The same for custom", "N"),
    Flag("sharegpt_output_len", int, "The same for sharegpt", "N"),
    Flag("seed", int, "Default 0", "N"),
)
LOAD_FLAGS = (
    Flag("request_rate", float, "Requests a second; default inf: all at once", "R"),
    Flag("burstiness", float, "1 (default) is Poisson; less is burstier; inf is even", "X"),
    Flag("max_concurrency", int, "Most requests under way at once", "N"),
    Flag("ramp_up_strategy", str, "linear or exponential", "NAME"),
    Flag("ramp_up_start_rps", float, "Rate at the start of a ramp", "R"),
    Flag("ramp_up_end_rps", float, "Rate at its end", "R"),
    Flag("num_warmups", int, "Requests beforehand, not counted; default 1", "N"),
    Flag("ready_check_timeout_sec", float, "Seconds to wait for the server; default 60", "SECONDS"),
)
BODY_FLAGS = (
    *select(SAMPLING_FLAGS, "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "logprobs"),
    Flag("ignore_eos", bool, "Outputs of full length; default for random prompts"),
    Flag("extra_body", str, "More fields of all requests, as a JSON object", "JSON"),
)
REPORT_FLAGS = (
    Flag("percentile_metrics", str, "Of ttft, tpot, itl, e2el; default ttft,tpot,itl", "NAMES"),
    Flag("metric_percentiles", str, "Default 99", "NUMBERS"),
    Flag("goodput", list[str], "METRIC:MILLISECONDS that a good request keeps; several, or repeated", "LIMIT"),
    Flag("save_result", bool, "Write the result to a file"),
    Flag("save_detailed", bool, "With times, lengths and texts of each request in the file"),
    Flag("label", str, "Kept in the result", "TEXT"),
    Flag("metadata", list[str], "KEY=VALUE, kept in the result; several, or repeated", "PAIR"),
    Flag("result_dir", str, "Default .", "FOLDER"),
    Flag("result_filename", str, "Default by time and model", "FILE"),
)


@with_flags(target=TARGET_FLAGS, data=DATA_FLAGS, load=LOAD_FLAGS, body=BODY_FLAGS, report=REPORT_FLAGS)
def bench_serve(
    *,
    target: Group,
    data: Group,
    load: Group,
    body: Group,
    report: Group,
    show_outputs: Annotated[bool, typer.Option("--show-outputs", help="Print the texts.")] = False,
) -> None:
    """Load a running server and report latencies and throughput; one JSON line last."""
    result = run(target, data, load, body=body, report=report, show_outputs=show_outputs)
    print(json.dumps(result))


def run(target: Group, data: Group, load: Group, *, body: Group, report: Group,
        show_outputs: bool = False) -> dict[str, Any]:
    """The benchmark; prints the table and returns the result. Raises ValueError for wrong options or a dead server."""
    import httpx

    from aspire.bench import serve, serve_report

    shown, notes = _report(report), _notes(report)
    arrivals = _arrivals(load)
    requests, extra = _requests(data, body, target.get("backend", "openai"))
    goal = _target(target, extra)
    try:
        goal = _wait_for(goal, load.get("ready_check_timeout_sec", 60.0))
        for _ in range(load.get("num_warmups", 1)):
            [outcome], _ = asyncio.run(serve.run_load(goal, requests[:1], serve.Arrivals()))
            if outcome.error is not None:
                raise ValueError(f"the server must answer a first request, got {outcome.error}")
        before = _counters(goal)
        outcomes, duration = asyncio.run(serve.run_load(goal, requests, arrivals, seed=data.get("seed", 0),
                                                        max_concurrency=load.get("max_concurrency")))
        speculation = serve_report.speculation_summary(before, _counters(goal))
    except httpx.HTTPError as error:
        raise ValueError(f"base_url must be a running server, got {goal.base_url} ({error})") from error
    result = {**notes, "backend": goal.backend, "model_id": goal.model, "num_prompts": len(requests),
              "request_rate": "inf" if math.isinf(arrivals.rate) else arrivals.rate,
              "burstiness": arrivals.burstiness, "max_concurrency": load.get("max_concurrency"),
              **serve_report.summarize(outcomes, duration, shown), **speculation,
              "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:5]}
    if show_outputs:
        for i, outcome in enumerate(outcomes):
            print(f"--- {i}\n{outcome.text}")
    print(serve_report.table(result, shown))
    if report.get("save_result"):
        _save({**result, **(serve_report.details(outcomes) if report.get("save_detailed") else {})}, report)
    return result


def _report(options: Group) -> Any:
    from aspire.bench.serve_report import Report

    goodput: dict[str, float] = {}
    for limit in options.get("goodput", ()):
        name, _, value = limit.partition(":")
        try:
            goodput[name] = float(value)
        except ValueError:
            raise ValueError(f"goodput must be METRIC:MILLISECONDS, got {limit!r}") from None
    text = options.get("metric_percentiles", "99")
    try:
        percentiles = tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"metric_percentiles must be numbers with commas between, got {text!r}") from None
    return Report(percentiles, tuple(options.get("percentile_metrics", "ttft,tpot,itl").split(",")), goodput)


def _notes(options: Group) -> dict[str, str]:
    """What the result keeps for its reader."""
    pairs = [pair.partition("=") for pair in options.get("metadata", ())]
    for key, equals, value in pairs:
        if not (key and equals):
            raise ValueError(f"metadata must be KEY=VALUE, got {key + equals + value!r}")
    return {**({"label": options["label"]} if "label" in options else {}), **{key: value for key, _, value in pairs}}


def _extra_body(text: str) -> Group:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"extra_body must be a JSON object, got {text!r}")
    return fields


def _arrivals(options: Group) -> Any:
    from aspire.bench.serve import Arrivals

    return Arrivals(options.get("request_rate", math.inf), options.get("burstiness", 1.0),
                    options.get("ramp_up_strategy"), options.get("ramp_up_start_rps", 1.0),
                    options.get("ramp_up_end_rps", 1.0))


def _requests(data: Group, body: Group, backend: str) -> tuple[list[Any], Group]:
    """The requests, and the fields that all bodies carry."""
    from aspire.bench import serve

    name, count, seed = data.get("dataset_name", "random"), data.get("num_prompts", 1000), data.get("seed", 0)
    if name not in serve.DATASETS:
        raise ValueError(f"dataset_name must be one of {', '.join(serve.DATASETS)}, got {name!r}")
    if count < 1:
        raise ValueError(f"num_prompts must be >= 1, got {count!r}")
    more = _extra_body(body["extra_body"]) if "extra_body" in body else {}
    extra = {"temperature": 0.0, **{key: value for key, value in body.items() if key != "extra_body"}, **more}
    if name == "random":
        extra.setdefault("ignore_eos", True)
        requests = serve.random_requests(
            count, (data.get("random_input_len", 1024), data.get("random_output_len", 128)), seed=seed,
            spread=data.get("random_range_ratio", 0.0), prefix=data.get("random_prefix_len", 0),
            vocab_size=data.get("random_vocab_size", 256))
    elif "dataset_path" not in data:
        raise ValueError(f"dataset_path must be given for {name}")
    else:
        requests = serve.file_requests(name, data["dataset_path"], count,
                                       data.get(f"{name}_output_len", data.get("output_len")), seed)
    return (serve.as_text(requests) if backend == "openai-chat" else requests), extra


def _target(options: Group, extra: Group) -> Any:
    from aspire.bench.serve import BACKENDS, ENDPOINTS, Target

    backend = options.get("backend", "openai")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    url = options.get("base_url") or f"http://{options.get('host', '127.0.0.1')}:{options.get('port', 8000)}"
    return Target(url, options.get("endpoint", ENDPOINTS[backend]), backend,
                  options.get("served_model_name") or options.get("model", ""), options.get("api_key"), extra)


def _wait_for(goal: Any, seconds: float) -> Any:
    """The target with its model's name, once the server answers."""
    import httpx

    headers = {"Authorization": f"Bearer {goal.api_key}"} if goal.api_key else {}
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = httpx.get(goal.base_url + "/v1/models", headers=headers, timeout=10, trust_env=False)
            break
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.25)
    if answer.status_code != 200:
        raise ValueError(f"the server must list its models, got HTTP {answer.status_code}")
    return goal if goal.model else replace(goal, model=answer.json()["data"][0]["id"])


def _counters(goal: Any) -> dict[str, float]:
    """Speculation counters of servers that have them."""
    import httpx

    from aspire.bench.serve_report import speculation_counters

    answer = httpx.get(goal.base_url + "/metrics", timeout=10, trust_env=False)
    return speculation_counters(answer.text) if answer.status_code == 200 else {}


def _save(result: dict[str, Any], options: Group) -> None:
    name = options.get("result_filename") or (f"{result['backend']}-{time.strftime('%Y%m%d-%H%M%S')}-"
                                              f"{result['model_id'].replace('/', '_')}.json")
    path = Path(options.get("result_dir", ".")) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"result: {path}")
