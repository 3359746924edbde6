"""Grammars of the running slots: compiled on arrival, masks for every pick, and the tokens they follow.

Masks need the values of drafts on the host, so the overlapped loop waits while a request with a grammar runs.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from aspire.request import Request, SamplingParams, StructuredOutputs
from aspire.sampling.grammar import GrammarCompiler, GrammarSlots, SlotGrammar
from aspire.schedule.plan import RowKind, StepPlan, Verdict


class Constraints:
    """Checks and compiles what requests ask for. The compiler is made at the first request that needs it."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._compiler: GrammarCompiler | None = None

    def check(self, params: SamplingParams) -> None:
        """ValueError for a constraint that cannot be compiled."""
        if params.structured_outputs is not None:
            self._get().compile(params.structured_outputs)

    def matcher(self, spec: StructuredOutputs) -> SlotGrammar:
        compiler = self._get()
        return compiler.matcher(compiler.compile(spec))

    def _get(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._compiler


class Grammars:
    """The grammars of the slots."""

    def __init__(self, num_slots: int, vocab_size: int, constraints: Constraints) -> None:
        self._constraints = constraints
        self._slots = GrammarSlots(num_slots, vocab_size)
        self._drafts: list[list[int]] = [[] for _ in range(num_slots + 1)]  # host's copy of each slot's drafts

    def admit(self, slot: int, request: Request) -> None:
        spec = request.params.structured_outputs
        self._drafts[slot].clear()
        if spec is None:
            self._slots.admit(slot, None)
            return
        self._slots.admit(slot, self._constraints.matcher(spec), request.output_token_ids)

    def needed(self, slots: Sequence[int]) -> bool:
        return self._slots.needed(slots)

    def needed_by(self, plan: StepPlan) -> bool:
        return self._slots.needed(row.slot for row in plan.rows)

    def bitmask(self, plan: StepPlan) -> Tensor | None:
        """Masks int32 [N, ceil(V / 32)] of a plan's picks, in batch order."""
        picks: list[tuple[int, Sequence[int]]] = []
        for row in plan.rows:
            if not row.samples:
                continue
            if row.tokens:
                picks.append((row.slot, ()))
            elif row.kind is RowKind.SPARSE:
                picks.append((row.slot, self._drafts[row.slot][: row.num_drafted]))
            else:
                drafts = self._drafts[row.slot][: row.num_drafted]
                picks += [(row.slot, drafts[:count]) for count in range(row.num_drafted + 1)]
        return self._slots.bitmask(picks)

    def forced(self, slot: int, limit: int) -> tuple[int, ...]:
        """Tokens after the slot's drafts that its grammar leaves no choice about."""
        return self._slots.forced(slot, self._drafts[slot], limit)

    def is_broken(self, slot: int) -> bool:
        """Whether a committed token of the slot's request was not allowed."""
        return self._slots.is_broken(slot)

    def add_drafts(self, slot: int, tokens: Sequence[int]) -> None:
        self._drafts[slot] += tokens

    def follow(self, plan: StepPlan, verdicts: list[Verdict], picks: list[int]) -> None:
        """Commit emitted tokens and remember drafts. picks: the first of each row."""
        for row, verdict, pick in zip(plan.rows, verdicts, picks, strict=True):
            if row.samples and not row.emits:
                drafts = self._drafts[row.slot]
                del drafts[row.num_drafted :]
                drafts.append(pick)
            elif verdict.tokens:
                self._slots.commit(row.slot, verdict.tokens)
                self._drafts[row.slot].clear()
