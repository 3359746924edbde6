"""What a layer does with its queries in a mixed step: store KV, attend, score, renew selections."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aspire.attention.protocol import AttentionBackend
from aspire.attention.rows import AttentionOptions, AttentionRows, Probe
from aspire.ops.locate.values import Located, ScoringRows
from aspire.ops.select_topk.lists import ListRows
from aspire.runtime.cache import KVCache, Selection
from aspire.runtime.operators import Operators
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


class StepAttention:
    """The `attend` of one step. `finish` applies what must serve from the next step on."""

    def __init__(self, setup: LayerSetup, rows: AttentionRows, located: Located) -> None:
        self.setup = setup
        self.rows = rows
        self.located = located
        self._resting = None if setup.layers.refresh_every == 1 else replace(rows, sparse=located.rests, view=1)
        self._pending: list[tuple[ScoringRows, Tensor, ListRows]] = []
        self._verify = _verifying(located.scoring)
        self._draft = _drafting(located.scoring, located.draft_token)
        self._both = located.scoring if len(located.scoring.row) else None
        together = setup.layers.chosen_together if self._verify is not None else ()
        self._gathered = frozenset(together)
        self._together = self._chosen_together(together, self._verify)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, H, D], key and value [T, KH, D] -> [T, H, D]."""
        setup = self.setup
        key_cache, value_cache = setup.cache.key[layer], setup.cache.value[layer]
        setup.backend.store(key, value, key_cache, value_cache, self.located.slot_mapping, setup.options[layer])
        reads, rows = setup.layers.reads[layer], self.rows
        if self._resting is not None and reads is None:
            reads = setup.layers.reads_between(layer)
            rows = rows if reads is None else self._resting
        selection = None if reads is None else setup.selection.view(reads)
        scoring = self._scoring(layer)
        together = self._together if layer in self._gathered else None
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
            lists, _ = _span(self.setup.layers.verify_writes[min(self._gathered)])
            self._select(self._verify, self._together.scores, self._lists(self._verify, (lists, 1), (0, 0)))

    def _scoring(self, layer: int) -> ScoringRows | None:
        verify, draft = self.setup.layers.verify_writes[layer], self.setup.layers.draft_writes[layer]
        if draft and (verify or self.setup.selection.config.merge == "mix"):
            return self._both
        return self._verify if verify else self._draft if draft else None

    def _probe(self, scoring: ScoringRows, query: Tensor) -> Probe:
        num_rows, num_queries = scoring.token.shape
        logits = torch.empty(num_rows, num_queries, query.shape[1], probe_width(self.rows.max_kv_len),
                             dtype=probe_dtype(query.device), device=query.device)
        return Probe(scoring.token, scoring.row, logits)

    def _chosen_together(self, layers: tuple[int, ...], verify: ScoringRows | None) -> ChosenTogether | None:
        if verify is None or not layers:
            return None
        setup = self.setup
        windows = tuple(setup.options[layer].window for layer in layers)
        return ChosenTogether(windows, verify.token, verify.row, self.rows, setup.selection.config, setup.operators)

    def _renew(self, layer: int, scoring: ScoringRows, probe: Probe, lse: Tensor) -> None:
        """Lists from this layer's scores, kept now or after the step as the layer plan says."""
        store, config, plan = self.setup.selection, self.setup.selection.config, self.setup.layers
        operators = self.setup.operators
        scores = operators.key_scores(probe, lse, self.rows, unit=config.unit, reduce=config.reduce,
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
                        store.places_in(self.rows.block_table))

    def _select(self, scoring: ScoringRows, scores: Tensor, lists: ListRows) -> None:
        self.setup.operators.select_into(scores, scoring.first, scoring.last, scoring.wanted,
                                         coverage=self.setup.selection.config.coverage, lists=lists)


def _verifying(rows: ScoringRows) -> ScoringRows | None:
    """Those of both kinds that verify; None: there are none."""
    n = rows.num_verify
    if n in (0, len(rows.row)):
        return rows if n else None
    return ScoringRows(rows.token[:n], rows.row[:n], rows.slot[:n], n, rows.first[:n], rows.last[:n], rows.wanted[:n])


def _drafting(rows: ScoringRows, token: Tensor) -> ScoringRows | None:
    """Those that draft. token: int32 [D, 1], their queries."""
    n = rows.num_verify
    if n == len(rows.row):
        return None
    return ScoringRows(token, rows.row[n:], rows.slot[n:], 0, rows.first[n:], rows.last[n:], rows.wanted[n:])


def _span(lists: tuple[int, ...]) -> tuple[int, int]:
    """Lists that follow each other, as (first, count)."""
    return (lists[0], len(lists)) if lists else (0, 0)
