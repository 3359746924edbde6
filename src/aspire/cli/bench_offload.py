"""`aspire bench offload`: sessions in a small KV pool, without and with host memory behind it."""

from typing import Annotated

import typer


def offload(
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Real weights; default smollm2-135m")] = None,
    shape: Annotated[str | None, typer.Option(
        metavar="NAME", help="Known model shape with dummy weights instead; its first contexts are noise")] = None,
    policy: Annotated[list[str] | None, typer.Option(
        metavar="NAME", help="May be repeated; default autoregressive")] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Requests at once")] = 6,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the first prompts")] = 256,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer")] = 128,
    turns: Annotated[int, typer.Option(min=1, help="Answers per session; each follow-up adds 32 tokens")] = 2,
    pool: Annotated[float, typer.Option(
        min=0, max=1, help="Size of the pool, as a share of what all sessions need in the end")] = 0.5,
    kv_offload_gb: Annotated[float, typer.Option(min=0, metavar="GIB", help="Host memory")] = 1.0,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    block_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a KV block")] = 16,
    dtype: Annotated[str, typer.Option(metavar="NAME")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(metavar="NAME", help="As for serve")] = "auto",
    loop: Annotated[str, typer.Option(metavar="NAME", help="auto, plain or overlapped")] = "auto",
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant")] = False,
) -> None:
    """Every turn without and with host memory; a table, then one JSON line per turn."""
    from aspire.bench.offload import Sessions, print_table, run
    from aspire.bench.throughput import Bench
    from aspire.config import CacheConfig, EngineOptions
    from aspire.speculation.policy import resolve_policy

    if model is not None and shape is not None:
        raise ValueError(f"model must not be given beside shape, got {model!r}")
    if loop not in ("auto", "plain", "overlapped"):
        raise ValueError(f"loop must be one of auto, plain, overlapped, got {loop!r}")
    policies = policy or ["autoregressive"]
    for name in policies:
        resolve_policy(name, 4)  # refuses an unknown name before anything is loaded
    CacheConfig(kv_cache_dtype=kv_cache_dtype, kv_offload_gb=kv_offload_gb)
    options: EngineOptions = {"loop": loop, "batch_invariant": batch_invariant,  # type: ignore[typeddict-item]
                              "kv_cache_dtype": kv_cache_dtype, "block_size": block_size, "capture_at_start": False}
    chosen = None if shape else model or "smollm2-135m"
    bench = Bench(shape or str(chosen), model=chosen, dtype=dtype, options=options)
    work = Sessions(sessions, context, new_tokens, turns, pool, shape is not None, temperature)
    print_table([turn for one in policies for turn in run(bench, one, work, (0.0, kv_offload_gb))])
