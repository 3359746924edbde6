"""What KV offload to host memory gains: the same sessions in a small pool without and with it.

    aspire bench offload --model smollm2-135m

All sessions start at once in a pool that holds a share of them, so the youngest are preempted; when all have their
answers, each goes on with a follow-up, and its context is no longer on the device. Without offload both cost the
context's computation anew.
"""

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from aspire.bench.contexts import Windows
from aspire.bench.replay import PretendCached
from aspire.bench.throughput import Bench, Recorder, Workload
from aspire.config import EngineOptions
from aspire.engine import Engine
from aspire.request import RequestOutput, SamplingParams
from aspire.samples import gsm8k_sample

FOLLOW_UP = 32  # tokens that a user adds


@dataclass(frozen=True, slots=True)
class Sessions:
    """pool: share of the blocks that all sessions need at the end of the last turn. random_context: the first prompts
    are taken as computed, over a cache of noise."""

    count: int
    context: int
    new_tokens: int
    turns: int
    pool: float
    random_context: bool
    temperature: float = 0.0

    def prompt_tokens(self, turn: int) -> int:
        return self.context + turn * (self.new_tokens + FOLLOW_UP)

    def num_blocks(self, block_size: int) -> int:
        """Of the pool; a single session always fits."""
        each = -(-(self.prompt_tokens(self.turns - 1) + self.new_tokens) // block_size) + 1
        return max(each, int(self.pool * self.count * each))


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of all sessions. Seconds from the first arrival to the last end; first_token: mean seconds from arrival.

    computed: tokens of prompts and of preempted requests that were computed. to_host, to_device: blocks copied.
    equal: to the run without offload; None where contexts are noise, which nothing can compute anew.
    """

    policy: str
    kv_offload_gb: float
    turn: int
    seconds: float
    tokens_per_second: float
    first_token: float
    preemptions: int
    prompt_tokens: int
    computed: int
    to_host: int
    to_device: int
    equal: bool | None = None


def run(bench: Bench, policy: str, work: Sessions, gibibytes: Sequence[float]) -> list[Turn]:
    """All turns with each size of host memory; the first is the yardstick for tokens."""
    found: list[Turn] = []
    yardstick: list[list[tuple[int, ...]]] = []
    base = bench.options
    for size in gibibytes:
        bench.options = options_for(base, work, size)
        tokens, turns = run_turns(bench, policy, work, size)
        yardstick = yardstick or tokens
        for index, turn in enumerate(turns):
            equal = None if work.random_context else tokens[index] == yardstick[index]
            found.append(Turn(**{**asdict(turn), "equal": equal}))
        bench.free()
    bench.options = base
    return found


def options_for(base: EngineOptions, work: Sessions, gibibytes: float) -> EngineOptions:
    """Engine options of a run; the caller's win but for the size of host memory."""
    chosen: EngineOptions = {"enable_prefix_caching": True, "num_blocks": work.num_blocks(base.get("block_size", 16)),
                             "max_num_seqs": work.count, "max_model_len": work.prompt_tokens(work.turns), **base}
    return {**chosen, "kv_offload_gb": gibibytes}


def run_turns(bench: Bench, policy: str, work: Sessions,
              gibibytes: float) -> tuple[list[list[tuple[int, ...]]], list[Turn]]:
    """Output tokens and figures of each turn, on one engine."""
    recorder = Recorder()
    load = Workload(work.count, work.context, work.new_tokens, work.temperature, work.random_context, None)
    engine = bench.engine(policy, load, recorder)
    prompts = first_prompts(bench, work)
    tokens, turns = [], []
    for turn in range(work.turns):
        recorder.steps.clear()
        begun = time.monotonic()
        outputs = serve(engine, prompts, turn, work)
        seconds = time.monotonic() - begun
        tokens.append([output.outputs[0].token_ids for output in outputs])
        turns.append(figures(policy, gibibytes, turn, seconds, outputs, recorder))
        if isinstance(engine.scheduler.pool, PretendCached):
            engine.scheduler.pool.pretends = False
        chance = random.Random(turn)
        prompts = [[*prompt, *output.outputs[0].token_ids, *(chance.choice(prompt) for _ in range(FOLLOW_UP))]
                   for prompt, output in zip(prompts, outputs, strict=True)]
    return tokens, turns


def first_prompts(bench: Bench, work: Sessions) -> list[list[int]]:
    """Solved problems where the model has a tokenizer, else random tokens."""
    if bench.tokenizer is not None and not work.random_context:
        return Windows(gsm8k_sample(), bench.tokenizer).contexts(work.count, work.context, seed=0)
    chance = random.Random(0)
    return [[chance.randrange(bench.spec.vocab_size) for _ in range(work.context)] for _ in range(work.count)]


def serve(engine: Engine, prompts: Sequence[Sequence[int]], turn: int, work: Sessions) -> list[RequestOutput]:
    """All prompts at once; outputs in their order."""
    for index, prompt in enumerate(prompts):
        engine.add(f"{turn}-{index}", prompt, SamplingParams(
            temperature=work.temperature, max_tokens=work.new_tokens, ignore_eos=True, detokenize=False, seed=index))
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        for group in engine.advance():
            if group.is_finished:
                done[group.request_id] = group.render()
    return [done[f"{turn}-{index}"] for index in range(len(prompts))]


def figures(policy: str, gibibytes: float, turn: int, seconds: float, outputs: Sequence[RequestOutput],
            recorder: Recorder) -> Turn:
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    waits = [one.time_to_first_token for one in metrics if one.time_to_first_token is not None]
    steps = recorder.steps
    return Turn(
        policy=policy, kv_offload_gb=gibibytes, turn=turn, seconds=seconds,
        tokens_per_second=sum(len(output.outputs[0].token_ids) for output in outputs) / seconds,
        first_token=statistics.mean(waits), preemptions=sum(len(step.preempted) for step in steps),
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        computed=sum(row.num_tokens for step in steps for row in step.rows if row.kind == "prefill"),
        to_host=sum(step.offloaded for step in steps), to_device=sum(step.restored for step in steps))


def print_table(turns: Sequence[Turn]) -> None:
    """A table, then one JSON line per turn."""
    from rich.console import Console
    from rich.table import Table

    table = Table("policy", "GiB", "turn", "seconds", "tokens/s", "first token s", "preempted", "prompt tokens",
                  "computed", "to host", "back", "equal")
    for t in turns:
        table.add_row(t.policy, f"{t.kv_offload_gb:g}", str(t.turn), f"{t.seconds:.2f}", f"{t.tokens_per_second:.1f}",
                      f"{t.first_token:.2f}", str(t.preemptions), str(t.prompt_tokens), str(t.computed),
                      str(t.to_host), str(t.to_device), "-" if t.equal is None else "yes" if t.equal else "no")
    Console(width=140).print(table)
    for turn in turns:
        print(json.dumps({"bench": "offload", **asdict(turn)}))
