"""Acceptance of selections on real text: the same contexts under every policy, drafts of one fixed length.

All requests draft in lock step, so that only the selection differs. Counted are the rounds that begin within a
request's first `tokens` output tokens; requests run on until the last one has made them, so that every step has the
whole batch and every counted round its full length. With exact arithmetic (float32 on the CPU, batch_invariant on
CUDA) all policies then draft the same tokens of the same text.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aspire.bench.engines import make_engine, wait_for
from aspire.bench.selections import Variant, variant_policy
from aspire.build import Loaded
from aspire.config import EngineOptions
from aspire.engine import Engine
from aspire.positions import wilson_interval
from aspire.request import SamplingParams
from aspire.speculation.cadence import Lockstep
from aspire.speculation.cost import KvShape
from aspire.speculation.policy import NO_OVERRIDES, Overrides, Policy
from aspire.stats import RowStats, StepStats

SLOWEST = 6  # requests may run on to this many times the counted tokens, while slower ones finish


@dataclass(frozen=True, slots=True)
class Round:
    """One verification. begun: output tokens of the request before it. kv_bytes: read by its drafts and itself;
    plain_bytes: what plain decoding would read for the tokens it emitted."""

    drafted: int
    accepted: int
    begun: int
    kv_bytes: float
    plain_bytes: float


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step in which requests only drafted, or only verified."""

    kind: str
    tokens: int
    kv_bytes: float
    seconds: float


class Tally:
    """An observer that keeps the verifications with drafts of every request, and what decoding steps took."""

    def __init__(self, prompt_lengths: dict[str, int], shape: KvShape) -> None:
        self.rounds: dict[str, list[Round]] = {request_id: [] for request_id in prompt_lengths}
        self.emitted = dict.fromkeys(prompt_lengths, 0)
        self._prompt = dict(prompt_lengths)
        self._drafting = dict.fromkeys(prompt_lengths, 0.0)
        self.steps: list[TimedStep] = []
        self._shape = shape

    def on_step(self, stats: StepStats) -> None:
        rows = [row for row in stats.rows if row.request_id in self.rounds]  # others are of an earlier run
        kv_bytes = sum([self._add(row) for row in rows])
        kinds = {row.kind for row in rows}
        if len(kinds) == 1 and len(rows) == len(stats.rows) and "prefill" not in kinds:
            self.steps.append(TimedStep(kinds.pop(), stats.tokens, kv_bytes, stats.duration))

    def _add(self, row: RowStats) -> float:
        """KV bytes that the row read."""
        key = row.request_id
        known = self._prompt[key] + self.emitted[key]
        read = (self._shape.sparse_bytes(known, row.num_drafted) if row.kind == "draft"
                else self._shape.full_bytes(known + row.num_drafted))
        if row.kind == "draft":
            self._drafting[key] += read
        elif row.kind == "verify" and row.num_drafted:
            plain = sum(self._shape.full_bytes(known + j) for j in range(row.num_accepted + 1))
            self.rounds[key].append(Round(row.num_drafted, row.num_accepted, self.emitted[key],
                                          self._drafting[key] + read, plain))
            self._drafting[key] = 0.0
        self.emitted[key] += row.num_emitted
        return read

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One selection at one budget and temperature. Index j - 1 of the tuples is position j of a round.

    reached: rounds whose drafts before j were all accepted, the trials; accepted: of those, j too. A draft behind a
    rejected one is no trial: what it met is not known. num_drafted: all drafts of the counted rounds.
    """

    selection: str
    budget: int | None
    temperature: float
    draft_length: int
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    num_drafted: int
    num_rounds: int
    kv_bytes: float
    plain_bytes: float
    seconds: float

    @property
    def trials(self) -> int:
        return sum(self.reached)

    @property
    def alpha(self) -> float:
        """Chance that a draft is accepted given all before it were."""
        return sum(self.accepted) / max(1, self.trials)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % bounds of alpha, taking trials for independent."""
        return wilson_interval(sum(self.accepted), self.trials)

    @property
    def tokens(self) -> int:
        """Emitted by the counted rounds: accepted drafts, and one more each."""
        return sum(self.accepted) + self.num_rounds

    @property
    def tokens_per_verification(self) -> float:
        return self.tokens / max(1, self.num_rounds)

    @property
    def wasted(self) -> float:
        """Share of drafts that were not accepted."""
        return 1.0 - sum(self.accepted) / max(1, self.num_drafted)

    @property
    def kv_bytes_per_token(self) -> float:
        """Read by drafts and verifications, per emitted token."""
        return self.kv_bytes / max(1, self.tokens)

    @property
    def kv_share(self) -> float:
        """Of what plain decoding reads."""
        return self.kv_bytes / max(1.0, self.plain_bytes)

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of rounds in which the first j drafts were all accepted."""
        return tuple(count / max(1, self.num_rounds) for count in self.accepted)


def tally_cell(rounds: Sequence[Round], **named: "str | float | int | None") -> Cell:
    """The counts of full-length rounds; `named`: the cell's other fields."""
    length = int(named["draft_length"] or 0)
    full = [one for one in rounds if one.drafted == length]
    positions = range(1, length + 1)
    return Cell(
        reached=tuple(sum(one.accepted >= j - 1 for one in full) for j in positions),
        accepted=tuple(sum(one.accepted >= j for one in full) for j in positions),
        num_drafted=sum(one.drafted for one in full), num_rounds=len(full),
        kv_bytes=sum(one.kv_bytes for one in full), plain_bytes=sum(one.plain_bytes for one in full),
        **named)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Work:
    """What every cell runs. tokens: counted output tokens per request."""

    contexts: tuple[tuple[int, ...], ...]
    draft_length: int
    tokens: int
    seed: int = 0

    @property
    def most_tokens(self) -> int:
        return SLOWEST * self.tokens + 2 * self.draft_length


def tokens_for(trials: int, requests: int, draft_length: int) -> int:
    """Output tokens per request that surely make `trials` trials in all: a round of a trials emits at most a + 1
    tokens, and that only when all its drafts are accepted."""
    each = -(-trials // requests)
    return each + -(-each // draft_length) + 1


class Lab:
    """Measures cells on one loaded model; all engines share the KV of the contexts."""

    def __init__(self, loaded: Loaded, work: Work, options: EngineOptions) -> None:
        """Raises ValueError when the contexts and what follows them exceed the model's limit."""
        self.loaded = loaded
        longest = max(len(context) for context in work.contexts)
        limit = min(longest + work.most_tokens, loaded.spec.max_model_len)
        if longest + work.tokens + work.draft_length > limit:
            raise ValueError(f"context must leave room for {work.tokens + work.draft_length} tokens below the model's "
                             f"limit of {loaded.spec.max_model_len}, got {longest}")
        size = options.get("block_size", 16)
        per_request = -(-(limit + 2 * (work.draft_length + 1)) // size)
        batch = len(work.contexts)
        self.options: EngineOptions = {
            "max_num_batched_tokens": 8192 if loaded.device.type == "cuda" else 2048,
            "num_blocks": batch * per_request,
            **options, "max_num_seqs": batch, "max_model_len": limit, "enable_prefix_caching": True}
        self.work = work
        self._last: Engine | None = None
        self._runs = 0

    def policy(self, variant: Variant, changes: Overrides = NO_OVERRIDES) -> Policy:
        """The variant for this model, drafting in lock step."""
        return variant_policy(variant, self.loaded.spec, Lockstep(self.work.draft_length), changes)

    def measure(self, name: str, policy: Policy, temperatures: Sequence[float], *, budget: int | None,
                report: Callable[[Cell], None], tokens: int | None = None) -> list[Cell]:
        """The cells of one selection, one per temperature; `report` is called with each as it is done. tokens:
        fewer than the work's."""
        engine = self.engine(policy)
        counted = min(tokens or self.work.tokens, self.work.tokens)

        def enough(tally: Tally) -> bool:
            return min(tally.emitted.values()) >= counted

        cells = []
        for temperature in temperatures:
            begun = time.monotonic()
            tally = self.run(engine, self.work.contexts, temperature, until=enough)
            rounds = [one for many in tally.rounds.values() for one in many if one.begun < counted]
            cells.append(tally_cell(rounds, selection=name, budget=budget, temperature=temperature,
                                    draft_length=policy.draft_limit, seconds=time.monotonic() - begun))
            report(cells[-1])
        return cells

    def prefill(self) -> float:
        """Compute the contexts' KV ahead of the first cell; seconds."""
        begun = time.monotonic()
        engine = self.engine(self.policy(Variant("autoregressive")))
        for context in self.work.contexts:
            engine.add(self._next_id(), context, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
        while engine.has_unfinished:
            engine.advance()
        wait_for(self.loaded.device)
        return time.monotonic() - begun

    def engine(self, policy: Policy) -> Engine:
        """An engine; those made before must not be used any more."""
        before, self._last = self._last, None
        self._last = make_engine(self.loaded, self.options, policy, predecessor=before)
        del before
        gc.collect()  # its graphs hold memory
        return self._last

    def run(self, engine: Engine, contexts: Sequence[Sequence[int]], temperature: float, *,
            until: Callable[[Tally], bool]) -> Tally:
        """Decode after all contexts until the tally suffices, or all output ends."""
        lengths: dict[str, int] = {}
        params = SamplingParams(temperature=temperature, ignore_eos=True, detokenize=False)
        limit = self.options["max_model_len"] or 0
        for index, context in enumerate(contexts):
            request_id = self._next_id()
            lengths[request_id] = len(context)
            engine.add(request_id, context, replace(params, seed=self.work.seed + index,
                                                    max_tokens=min(limit - len(context), self.work.most_tokens)))
        tally = Tally(lengths, engine.scheduler.cost.kv)
        engine.observers[1:] = [tally]  # the first one is the engine's own
        while engine.has_unfinished and not until(tally):
            engine.advance()
        for request_id in lengths:
            engine.abort(request_id)
        wait_for(self.loaded.device)
        return tally

    def _next_id(self) -> str:
        self._runs += 1
        return f"r{self._runs}"
