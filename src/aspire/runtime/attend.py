"""What a layer does with its queries in a mixed step: store KV, attend, score, renew selections."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aspire.attention.protocol import AttentionBackend
from aspire.attention.rows import AttentionOptions, Probe
from aspire.ops.select_topk.lists import ListRows
from aspire.runtime.batch import StepInputs, StepShape
from aspire.runtime.cache import KVCache, Selection
from aspire.runtime.operators import Operators
from aspire.runtime.step import Located
from aspire.runtime.together import ChosenTogether, probe_dtype, probe_width
from aspire.speculation.layers import LayerPlan


@dataclass(frozen=True, slots=True)
class LayerSetup:
    """What does not change between steps."""

    layers: LayerPlan
    options: tuple[AttentionOptions, ...]  # per layer
    cache: KVCache
    selection: Selection
    backend: AttentionBackend
    operators: Operators


@dataclass(frozen=True, slots=True)
class ScoringRows:
    """N rows whose queries score: verifying full rows first (the first `num_verify`), drafting rows after."""

    token: Tensor  # int32 [N, Q], -1 unused
    row: Tensor  # int32 [N]
    slot: Tensor  # int64 [N], scratch for padding
    num_verify: int
    first: Tensor  # int32 [N] candidates for the slot's lists: units [first, last)
    last: Tensor  # int32 [N]
    wanted: Tensor  # int32 [N] how many of them


class StepAttention:
    """The `attend` of one step. `finish` applies what must serve from the next step on."""

    def __init__(self, setup: LayerSetup, inputs: StepInputs, shape: StepShape, located: Located, *,
                 scratch: int) -> None:
        self.setup = setup
        self.located = located
        self.shape = shape
        self._resting = None if setup.layers.refresh_every == 1 else replace(
            located.rows, sparse=inputs.rests.bool(), view=1)
        self._pending: list[tuple[ScoringRows, Tensor, ListRows]] = []
        self._verify = self._verify_rows(inputs, scratch) if shape.verify_probes else None
        self._draft = self._draft_rows(inputs, scratch) if shape.draft_probes else None
        self._both = _join(self._verify, self._draft)
        self._together = self._chosen_together(self._verify)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, H, D], key and value [T, KH, D] -> [T, H, D]."""
        setup = self.setup
        key_cache, value_cache = setup.cache.key[layer], setup.cache.value[layer]
        setup.backend.store(key, value, key_cache, value_cache, self.located.slot_mapping, setup.options[layer])
        reads, rows = setup.layers.reads[layer], self.located.rows
        if self._resting is not None and reads is None:
            reads = setup.layers.reads_between(layer)
            rows = rows if reads is None else self._resting
        selection = None if reads is None else setup.selection.view(reads)
        scoring = self._scoring(layer)
        together = self._together if self._together is not None and layer in setup.layers.chosen_together else None
        probe = None if scoring is None else self._probe(scoring, query) if together is None else together.probe(query)
        out, lse = setup.backend.attend(query, key_cache, value_cache, rows, selection, setup.options[layer], probe)
        if scoring is not None and probe is not None:
            assert lse is not None, "a probe comes with the log-sum-exp"
            if together is None:
                self._renew(layer, scoring, probe, lse)
            else:
                together.add(lse)
        return out

    def finish(self) -> None:
        for change in self._pending:
            self._select(*change)
        self._pending.clear()
        if self._together is not None and self._verify is not None:
            plan = self.setup.layers
            lists, _ = _span(plan.verify_writes[plan.chosen_together[0]])
            self._select(self._verify, self._together.scores, self._lists(self._verify, (lists, 1), (0, 0)))

    def _scoring(self, layer: int) -> ScoringRows | None:
        verify, draft = self.setup.layers.verify_writes[layer], self.setup.layers.draft_writes[layer]
        if draft and (verify or self.setup.selection.config.merge == "mix"):
            return self._both
        return self._verify if verify else self._draft if draft else None

    def _probe(self, scoring: ScoringRows, query: Tensor) -> Probe:
        num_rows, num_queries = scoring.token.shape
        logits = torch.empty(num_rows, num_queries, query.shape[1], probe_width(self.shape.max_kv_len),
                             dtype=probe_dtype(query.device), device=query.device)
        return Probe(scoring.token, scoring.row, logits)

    def _chosen_together(self, verify: ScoringRows | None) -> ChosenTogether | None:
        layers, setup = self.setup.layers.chosen_together, self.setup
        if verify is None or not layers:
            return None
        windows = tuple(setup.options[layer].window for layer in layers)
        return ChosenTogether(windows, verify.token, verify.row, self.located.rows, setup.selection.config,
                              setup.operators)

    def _renew(self, layer: int, scoring: ScoringRows, probe: Probe, lse: Tensor) -> None:
        """Lists from this layer's scores, kept now or after the step as the layer plan says."""
        store, config, plan = self.setup.selection, self.setup.selection.config, self.setup.layers
        operators = self.setup.operators
        scores = operators.key_scores(probe, lse, self.located.rows, unit=config.unit, reduce=config.reduce,
                                      window=self.setup.options[layer].window)  # [N, U]
        if config.merge == "mix" and plan.draft_writes[layer]:
            store.mix(sum(map(bool, plan.draft_writes[:layer])), scoring.slot, scores, scoring.num_verify)
        lists = self._lists(scoring, _span(plan.verify_writes[layer]), _span(plan.draft_writes[layer]))
        if plan.apply == "same_step":
            self._select(scoring, scores, lists)
        else:
            self._pending.append((scoring, scores, lists))

    def _lists(self, scoring: ScoringRows, verify: tuple[int, int], draft: tuple[int, int]) -> ListRows:
        store = self.setup.selection
        return ListRows(store.units, store.num_units, scoring.slot, scoring.num_verify, verify, draft,
                        store.places_in(self.located.rows.block_table))

    def _select(self, scoring: ScoringRows, scores: Tensor, lists: ListRows) -> None:
        self.setup.operators.select_into(scores, scoring.first, scoring.last, scoring.wanted,
                                         coverage=self.setup.selection.config.coverage, lists=lists)

    def _verify_rows(self, inputs: StepInputs, scratch: int) -> ScoringRows:
        row = inputs.verify_row
        slot = torch.where(row >= 0, inputs.slot[row], scratch)
        return self._scoring_rows(inputs.verify_token.int(), row.int(), slot, len(row))

    def _draft_rows(self, inputs: StepInputs, scratch: int) -> ScoringRows:
        row = inputs.draft_row
        slot = torch.where(row >= 0, inputs.slot[row], scratch)
        token = torch.where(row >= 0, inputs.query_start[row], -1)[:, None]
        return self._scoring_rows(token.int(), row.int(), slot, 0)

    def _scoring_rows(self, token: Tensor, row: Tensor, slot: Tensor, num_verify: int) -> ScoringRows:
        store = self.setup.selection
        last = store.tail_start[slot] // store.config.unit
        return ScoringRows(token, row, slot, num_verify, torch.full_like(last, store.first_unit), last,
                           store.quota[slot])


def _join(verify: ScoringRows | None, draft: ScoringRows | None) -> ScoringRows | None:
    """Both kinds as one set; drafting rows are padded to the verifying rows' number of queries."""
    if verify is None or draft is None:
        return verify or draft
    spare = verify.token.shape[1] - draft.token.shape[1]
    token = torch.nn.functional.pad(draft.token, (0, spare), value=-1)
    joined = (torch.cat([getattr(verify, name), getattr(draft, name)])
              for name in ("row", "slot", "first", "last", "wanted"))
    row, slot, first, last, wanted = joined
    return ScoringRows(torch.cat([verify.token, token]), row, slot, verify.num_verify, first, last, wanted)


def _span(lists: tuple[int, ...]) -> tuple[int, int]:
    """Lists that follow each other, as (first, count)."""
    return (lists[0], len(lists)) if lists else (0, 0)
