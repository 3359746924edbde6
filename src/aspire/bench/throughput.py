"""Decode throughput of whole engines: step time, tokens per second, and the distance from the byte roofline.

    aspire bench throughput --shape llama-3.1-8b --batch 16 --context 32768 --policy autoregressive --policy aspire

With --random-context the KV pool is filled with noise and taken as computed, so no prefill is paid. With
--replay-acceptance drafts are accepted by a coin of that bias (a pure function of seed and position), for shapes
without real weights; the output says so. With --model, real weights continue real text, which is prefilled, and the
tokens of all policies are compared. Times are of steps with the full batch decoding.
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from aspire.bench.chunks import matrix_rate
from aspire.bench.replay import PretendCached, ReplayJudge
from aspire.bench.shapes import write_shape
from aspire.build import assemble
from aspire.config import EngineConfig, EngineOptions
from aspire.engine import Engine
from aspire.model.build import build_model
from aspire.model.resolve import load_tokenizer, resolve_model
from aspire.model.spec import ModelSpec
from aspire.outputs import RequestGroup
from aspire.request import SamplingParams
from aspire.runtime.cache import KVCache
from aspire.runtime.devices import choose_device, device_kit
from aspire.runtime.runner import Model, Runner
from aspire.schedule.blocks import BlockPool
from aspire.speculation.policy import NO_OVERRIDES, Overrides
from aspire.stats import StepStats


@dataclass(frozen=True, slots=True)
class Workload:
    """batch requests of context tokens each; each decodes up to new_tokens."""

    batch: int
    context: int
    new_tokens: int
    temperature: float
    random_context: bool
    replay: float | None
    overrides: Overrides = NO_OVERRIDES


@dataclass(frozen=True, slots=True)
class Result:
    """One policy. Seconds are medians or totals over steps in which the whole batch decodes.

    roofline_ms: weights and the KV that the mean step reads, over the copy bandwidth. fraction: of it reached.
    equal: requests whose tokens are those that the first policy gave; None for noise, and for the first.
    """

    shape: str
    policy: str
    batch: int
    context: int
    tokens_per_second: float
    step_ms: float
    tokens_per_step: float
    tokens_per_verification: float | None
    acceptance: float | None
    replayed: float | None
    weights_ms: float
    kv_ms: float
    roofline_ms: float
    fraction: float
    prefill_seconds: float
    prefill_tflops: float | None
    steps: int
    equal: int | None = None


class Recorder:
    """Keeps the steps' statistics."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def close(self) -> None:
        """Nothing is held."""


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read plus written; 1e11 assumed on the CPU."""
    if device.type != "cuda":
        return 1e11
    source = torch.empty(1 << 30, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(2 * source.numel() * 4 / (statistics.median(times) / 1e3))


def fill_with_noise(cache: KVCache) -> None:
    for tensor in (*cache.key, *cache.value):
        flat = tensor.view(-1)
        for first in range(0, len(flat), 1 << 26):
            part = flat[first : first + (1 << 26)]
            part.copy_(torch.randn(len(part), device=part.device, dtype=torch.bfloat16))


class Bench:
    """One model on one device; measures policies one after the other."""

    def __init__(self, shape: str, *, model: str | None, dtype: str, options: EngineOptions) -> None:
        self.shape = shape
        self.options = options
        self.device = choose_device("auto")
        self.bandwidth = copy_bandwidth(self.device)
        with tempfile.TemporaryDirectory() as directory:
            name = model or str(write_shape(shape, Path(directory)))
            source = resolve_model(name, load_format="auto" if model else "dummy")
            kit = device_kit(self.device, batch_invariant=bool(options.get("batch_invariant")),
                             attention_backend=options.get("attention_backend", "auto"))
            self.kit = kit
            resolved = "bfloat16" if dtype == "auto" and self.device.type == "cuda" else dtype
            self.dtype = "float32" if resolved == "auto" else resolved
            decoder, self.spec = build_model(source, dtype=getattr(torch, self.dtype), device=self.device,
                                             ops=kit.model_ops)
            self.tokenizer = load_tokenizer(source) if model else None
        self.model: Model = decoder
        self.weight_bytes = decoder.weight_bytes
        self._first: dict[str, list[int]] | None = None  # tokens of each request under the policy measured first

    def measure(self, policy: str, work: Workload, prompts: Sequence[Sequence[int]] | None = None) -> Result:
        """Throughput of one policy over one workload."""
        engine, recorder = self.begin(policy, work, prompts)
        begun = time.monotonic()
        decoding_since = None
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished and engine.scheduler.num_running + engine.scheduler.num_waiting == work.batch:
            _collect(engine.advance(), tokens)
            if decoding_since is None and recorder.steps and not _prefills(recorder.steps[-1]):
                self._wait()
                decoding_since = time.monotonic() - begun
        self._wait()
        while engine.has_unfinished:
            _collect(engine.advance(), tokens)
        every = engine.scheduler.cost.kv.refresh_every
        name = policy if every == 1 else f"{policy} every {every}"
        result = self._result(name, work, recorder.steps, decoding_since or 0.0, engine)
        if prompts is not None:
            result = replace(result, equal=None if self._first is None else sum(
                found == self._first[request] for request, found in tokens.items()))
            self._first = self._first or tokens
        del engine
        self.free()
        return result

    def free(self) -> None:
        """Give back what engines that nobody refers to held: the next one needs its memory for cache and graphs."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def begin(self, policy: str, work: Workload,
              prompts: Sequence[Sequence[int]] | None = None) -> tuple[Engine, Recorder]:
        """An engine that holds the whole workload and has not stepped yet."""
        recorder = Recorder()
        engine = self.engine(policy, work, recorder)
        prompts = prompts or self._random_prompts(work)
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, SamplingParams(temperature=work.temperature, max_tokens=work.new_tokens,
                                                          ignore_eos=True, detokenize=False, seed=index))
        return engine, recorder

    def _random_prompts(self, work: Workload) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        size = (work.batch, work.context)
        prompts: list[list[int]] = torch.randint(0, self.spec.vocab_size, size, generator=generator).tolist()
        return prompts

    def engine(self, policy: str, work: Workload, recorder: Recorder) -> Engine:
        """An engine without requests, as large as the workload."""
        limit = work.context + work.new_tokens + 1
        options: EngineOptions = {"max_num_seqs": work.batch, "max_model_len": min(limit, self.spec.max_model_len),
                                  "max_num_batched_tokens": 8192, "dtype": self.dtype,
                                  "enable_prefix_caching": False, **self.options, "policy": policy,
                                  "overrides": work.overrides}
        config = EngineConfig.from_options(self.shape, options)
        config = config.resolve(device=self.device.type, model_dtype=self.spec.dtype,
                                model_limit=self.spec.max_model_len)
        replay = work.replay
        engine = assemble(
            config, self.spec, self.model, self.tokenizer, device=self.device, kit=self.kit, observers=[recorder],
            pool_type=PretendCached if work.random_context else BlockPool,
            wrap_judge=(lambda judge: judge) if replay is None else (lambda judge: ReplayJudge(judge, replay)))
        runner = engine.loop.runner
        assert isinstance(runner, Runner), "assemble made it"
        if work.random_context:
            fill_with_noise(runner.setup.cache)
        if runner.graphs is not None:
            runner.graphs.capture(("greedy",) if work.temperature == 0 else ("plain",), lambda count: None)
        return engine

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _result(self, policy: str, work: Workload, steps: list[StepStats], prefill_seconds: float,
                engine: Engine) -> Result:
        full = [s for s in steps if len(s.rows) > 0 and not _prefills(s) and s.running == work.batch]
        full = full[min(10, len(full) // 4) :]  # the first steps warm up
        assert full, f"no step had all {work.batch} requests decoding: raise new_tokens, or memory holds too few"
        seconds = sum(s.duration for s in full)
        emitted = sum(s.num_emitted for s in full)
        drafted, accepted = sum(s.num_drafted for s in full), sum(s.num_accepted for s in full)
        verifications = sum(1 for s in full for row in s.rows if row.kind == "verify")
        kv = engine.scheduler.cost.kv
        kv_bytes = statistics.mean(
            sum(kv.sparse_bytes(work.context + work.new_tokens // 2, row.num_drafted) if row.kind == "draft"
                else kv.full_bytes(work.context + work.new_tokens // 2) for row in s.rows) for s in full)
        weights_ms, kv_ms = 1e3 * self.weight_bytes / self.bandwidth, 1e3 * kv_bytes / self.bandwidth
        step_ms = 1e3 * seconds / len(full)
        return Result(
            shape=self.shape, policy=policy, batch=work.batch, context=work.context,
            tokens_per_second=emitted / seconds, step_ms=step_ms, tokens_per_step=emitted / len(full),
            tokens_per_verification=emitted / verifications if verifications else None,
            acceptance=accepted / drafted if drafted else None, replayed=work.replay, weights_ms=weights_ms,
            kv_ms=kv_ms, roofline_ms=weights_ms + kv_ms, fraction=(weights_ms + kv_ms) / step_ms,
            prefill_seconds=prefill_seconds, prefill_tflops=self._prefill_tflops(work, prefill_seconds),
            steps=len(full))

    def _prefill_tflops(self, work: Workload, seconds: float) -> float | None:
        """Matrix products of weights and attention over the time to the first all-decoding step."""
        if work.random_context or not seconds:
            return None
        return prefill_flops(self.spec, work.batch, work.context) / seconds / 1e12


def prefill_flops(spec: ModelSpec, batch: int, context: int) -> float:
    """2 per weight and token (embedding table and output head left out), 4 * heads * dim per causal query-key pair."""
    weights = spec.num_parameters() - spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
    pairs = context * (context + 1) / 2
    return batch * (2.0 * weights * context + 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * pairs)


def _collect(groups: Sequence[RequestGroup], tokens: dict[str, list[int]]) -> None:
    tokens.update((group.request_id, list(group.sequences[0].output_token_ids))
                  for group in groups if group.is_finished)


def _prefills(stats: StepStats) -> bool:
    return any(row.kind == "prefill" for row in stats.rows)


def print_prefill(results: Sequence[Result], device: torch.device) -> None:
    """Rate of the prefill, on CUDA against that of a large matrix product measured now."""
    rate = matrix_rate() / 1e12 if device.type == "cuda" else None
    for result in results:
        assert result.prefill_tflops is not None, "the context was computed"
        share = "" if rate is None else f", {result.prefill_tflops / rate:.1%} of a matrix product's {rate:.0f}"
        print(f"{result.policy}: prefill {result.prefill_seconds:.2f} s, {result.prefill_tflops:.1f} TFLOP/s{share}")


def print_table(results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("shape", "policy", "batch x context", "tokens/s", "step ms", "tokens/step", "tokens/verif.",
                  "accepted", "weights ms", "KV ms", "of roofline", "prefill s")
    for r in results:
        accepted = "-" if r.acceptance is None else f"{r.acceptance:.3f}" + ("" if r.replayed is None else " replayed")
        table.add_row(r.shape, r.policy, f"{r.batch} x {r.context}", f"{r.tokens_per_second:.0f}", f"{r.step_ms:.3f}",
                      f"{r.tokens_per_step:.2f}",
                      "-" if r.tokens_per_verification is None else f"{r.tokens_per_verification:.2f}", accepted,
                      f"{r.weights_ms:.2f}", f"{r.kv_ms:.2f}", f"{r.fraction:.1%}", f"{r.prefill_seconds:.1f}")
    Console(width=160).print(table)
    for result in results[1:]:
        if result.equal is not None:
            print(f"{result.policy}: tokens of {result.equal} of {result.batch} requests equal {results[0].policy}'s")
    for result in results:
        print(json.dumps(asdict(result)))
