"""Whole engines for tests: around a tiny random model, or around a model whose next token is a script."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aspire.build import assemble
from aspire.config import EngineConfig, EngineOptions
from aspire.engine import Engine
from aspire.model.build import build_model, torch_dtype
from aspire.model.resolve import load_tokenizer, resolve_model
from aspire.model.spec import ModelSpec
from aspire.ops.locate.values import StepInputs
from aspire.ops.sample.rows import SamplingRows
from aspire.request import RequestOutput, SamplingParams
from aspire.runtime.devices import device_kit
from aspire.runtime.judges import Judge, Outcome
from aspire.runtime.runner import Model
from aspire.speculation.policy import Policy
from aspire.testing.models import tiny_model


@dataclass(frozen=True, slots=True)
class TestBed:
    """A loaded model from which engines are assembled; engines share its weights and nothing else."""

    __test__ = False

    name: str
    spec: ModelSpec
    model: Model
    tokenizer: Any
    device: str = "cpu"
    dtype: str = "float32"
    batch_invariant: bool = False

    def engine(self, options: EngineOptions | None = None, *, policy: Policy | None = None,
               wrap_judge: Callable[[Judge], Judge] = lambda judge: judge) -> Engine:
        """options: as for LLM; graphs are captured when first needed."""
        chosen: EngineOptions = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": self.dtype,
                                 "batch_invariant": self.batch_invariant, "capture_at_start": False,
                                 **(options or {})}
        config = EngineConfig.from_options(self.name, chosen)
        config = config.resolve(device=self.device, model_dtype=self.spec.dtype, model_limit=self.spec.max_model_len)
        return assemble(config, self.spec, self.model, self.tokenizer, device=torch.device(self.device), policy=policy,
                        wrap_judge=wrap_judge)


def tiny_bed(directory: str | Path, family: str = "llama", **sizes: Any) -> TestBed:
    """A tiny random model of a family with a byte tokenizer (see models.tiny_model), written into `directory`."""
    return loaded_bed(str(tiny_model(directory, family, **sizes)))


def loaded_bed(name: str, *, device: str = "cpu", dtype: str = "float32", batch_invariant: bool = False) -> TestBed:
    """Any model that resolves, on a device."""
    source = resolve_model(name)
    kit = device_kit(torch.device(device), batch_invariant=batch_invariant)
    model, spec = build_model(source, dtype=torch_dtype(dtype), device=device, ops=kit.model_ops)
    return TestBed(name, spec, model, load_tokenizer(source), device, dtype, batch_invariant)


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """Logits by position: the token after position p is script[p + 1 - start], then `filler`. Attention is called with
    constants, so that caches, lists and blocks are exercised all the same."""

    script: Sequence[int]
    start: int  # length of the prompt
    spec: ModelSpec
    filler: int = 0

    def forward(self, tokens: Tensor, positions: Tensor,
                attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        spec = self.spec
        query = torch.ones(len(tokens), spec.num_heads, spec.head_dim)
        keys = torch.ones(len(tokens), spec.num_kv_heads, spec.head_dim)
        for layer in range(spec.num_layers):
            attend(layer, query, keys, keys)
        return positions[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        script = torch.tensor(list(self.script))
        place = hidden[:, 0].long() + 1 - self.start
        inside = (place >= 0) & (place < len(script))
        token = torch.where(inside, script[place.clamp(0, len(script) - 1)], self.filler)
        return torch.nn.functional.one_hot(token, self.spec.vocab_size).float() * 20


def scripted_bed(bed: TestBed, script: Sequence[int], *, prompt_len: int) -> TestBed:
    """The same tokenizer and sizes around a ScriptedModel."""
    return TestBed(bed.name, bed.spec, ScriptedModel(tuple(script), prompt_len, bed.spec), bed.tokenizer)


@dataclass(slots=True)
class ScriptedVerdicts:
    """A judge that accepts at most limits[i] drafts in the i-th verification of each slot (repeating): any verdict
    sequence can be forced, and the output stays the target's."""

    judge: Judge
    limits: Sequence[int]
    _rounds: dict[int, int] = field(default_factory=dict)

    def decide(self, logits: Tensor, rows: SamplingRows, inputs: StepInputs) -> Outcome:
        outcome = self.judge.decide(logits, rows, inputs)
        accepted = outcome.num_accepted
        for row, slot in enumerate(inputs.slot.tolist()):
            if inputs.sparse[row] == 0 and inputs.decode[row] == 1:
                turn = self._rounds.get(slot, 0)
                self._rounds[slot] = turn + 1
                accepted[row] = min(int(accepted[row]), self.limits[turn % len(self.limits)])
        return outcome.accepting(accepted)


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | SamplingParams, *,
        max_steps: int = 5000) -> list[RequestOutput]:
    """Serve all prompts, checking every invariant after every step; outputs in order."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        engine.add(str(index), prompt, one)
    finished: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            break
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        engine.scheduler.check()
    assert not engine.has_unfinished, f"not finished after {max_steps} steps"
    return [finished[str(index)] for index in range(len(prompts))]
