"""`aspire bench throughput`: decode steps of whole engines on known shapes, against the byte roofline."""

from dataclasses import replace
from typing import Annotated

import typer


def throughput(
    shape: Annotated[str, typer.Option(metavar="NAME", help="Known model shape, with dummy weights")] = "llama-3.1-8b",
    model: Annotated[str | None, typer.Option(
        metavar="MODEL", help="Real weights instead, on real text, which is computed; tokens are compared")] = None,
    data: Annotated[list[str] | None, typer.Option(
        metavar="FILE", help="With --model: solved problems as JSON lines; default the sample of GSM8K")] = None,
    policy: Annotated[list[str] | None, typer.Option(
        metavar="NAME", help="May be repeated; default autoregressive and aspire")] = None,
    refresh_every: Annotated[int, typer.Option(
        min=1, metavar="N", help="Drafts from one renewal of the lists to the next, in policies that renew them")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Requests")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens of context, filled with noise")] = 32768,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per request")] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    replay_acceptance: Annotated[float | None, typer.Option(
        min=0, max=1, help="Accept drafts by a coin of this bias; dummy weights accept hardly any")] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME")] = "auto",
    loop: Annotated[str, typer.Option(metavar="NAME", help="auto, plain or overlapped")] = "auto",
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant")] = False,
    kv_cache_dtype: Annotated[str, typer.Option(metavar="NAME", help="As for serve")] = "auto",
    attention_backend: Annotated[str, typer.Option(metavar="NAME", help="As for serve")] = "auto",
    kv_offload_gb: Annotated[float, typer.Option(min=0, metavar="GIB", help="As for serve")] = 0.0,
    prefill: Annotated[bool, typer.Option(
        "--prefill", help="Compute the context instead of filling it with noise, and rate that")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Also show where the device's time goes")] = False,
) -> None:
    """Time steps in which the whole batch decodes; a table, then one JSON line per policy."""
    from aspire.bench.contexts import Windows, read_problems
    from aspire.bench.profile import print_profile, profile_steps
    from aspire.bench.throughput import Bench, Workload, print_prefill, print_table
    from aspire.config import EngineOptions
    from aspire.samples import gsm8k_sample
    from aspire.speculation.policy import NO_OVERRIDES, Overrides, resolve_policy

    if model is not None and replay_acceptance is not None:
        raise ValueError("replay_acceptance is for shapes without weights; with model drafts are judged as always")
    if model is None and data:
        raise ValueError("data needs model: shapes without weights read noise")
    if loop not in ("auto", "plain", "overlapped"):
        raise ValueError(f"loop must be one of auto, plain, overlapped, got {loop!r}")
    policies = policy or ["autoregressive", "aspire"]
    changes = {}
    for name in policies:
        preset = resolve_policy(name, 4)  # refuses an unknown name before minutes are spent on the known ones
        renews = preset.lossless and any(preset.layers.draft_writes)
        changes[name] = Overrides(refresh_every=refresh_every) if renews else NO_OVERRIDES
    options: EngineOptions = {"loop": loop, "batch_invariant": batch_invariant,  # type: ignore[typeddict-item]
                              "attention_backend": attention_backend,
                              "kv_cache_dtype": kv_cache_dtype, "capture_at_start": False,
                              "kv_offload_gb": kv_offload_gb, "enable_prefix_caching": kv_offload_gb > 0}
    problems = [problem for path in data for problem in read_problems(path)] if data else []  # refused at once
    bench = Bench(model or shape, model=model, dtype=dtype, options=options)
    prompts = None
    if model is not None:
        prompts, prefill = Windows(problems or gsm8k_sample(), bench.tokenizer).contexts(batch, context, seed=0), True
    works = {name: Workload(batch, context, new_tokens, temperature, not prefill,
                            None if name == "autoregressive" else replay_acceptance, changes[name])
             for name in policies}
    if prefill and bench.device.type == "cuda":  # compiles kernels
        bench.measure(policies[0], replace(works[policies[0]], batch=1, new_tokens=16))
    results = [bench.measure(name, work, prompts) for name, work in works.items()]
    print_table(results)
    if prefill:
        print_prefill(results, bench.device)
    for name, work in works.items() if profile else ():
        print(f"policy {name}")
        print_profile(profile_steps(bench, name, work))
