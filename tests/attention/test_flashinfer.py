"""The FlashInfer backend, with a stand-in for the package where that is not installed."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aspire.attention.flashinfer import FlashInferAttention, load_flashinfer
from aspire.attention.reference import ReferenceAttention
from aspire.attention.rows import AttentionOptions, AttentionRows, HostRow, Probe
from aspire.build import assemble
from aspire.config import EngineConfig
from aspire.model.layers import ModelOps
from aspire.ops.paged_attention.reference import paged_attention
from aspire.request import SamplingParams
from aspire.runtime.devices import DeviceKit
from aspire.runtime.operators import reference_operators
from aspire.speculation.policy import Overrides
from aspire.testing.attention_cases import AttentionCase, CaseSpec, RowSpec, make_case
from aspire.testing.engines import run, tiny_bed


class StandInWrapper:
    """BatchPrefillWithPagedKVCacheWrapper in torch: takes what the package takes, in its conventions."""

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")
        self.num_plans = self.num_runs = 0

    def plan(self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
             num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
             sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
             q_data_type: Any = "float16", kv_data_type: Any = None) -> None:
        assert all(t.dtype == torch.int32 for t in (qo_indptr, paged_kv_indptr, paged_kv_indices))
        assert qo_indptr.device.type == paged_kv_indptr.device.type == paged_kv_last_page_len.device.type == "cpu"
        assert causal
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        self.num_plans += 1
        self.sizes, self.dtypes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size), (q_data_type, kv_data_type)
        pages = paged_kv_indptr.diff()
        table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for row, own in enumerate(paged_kv_indices.split(pages.tolist())):
            table[row, :len(own)] = own
        kv_len = (pages - 1) * page_size + paged_kv_last_page_len
        assert bool((paged_kv_last_page_len >= 1).all())
        assert bool((paged_kv_last_page_len <= page_size).all())
        rows = len(pages)
        none = torch.zeros(rows, dtype=torch.int32)
        self.rows = AttentionRows(qo_indptr, kv_len.int(), torch.arange(rows).int(), none.bool(), table, none,
                                  int(qo_indptr.diff().max()), int(kv_len.max()))
        assert sm_scale is not None
        self.options = AttentionOptions(sm_scale, None if window_left < 0 else window_left + 1, logits_soft_cap)

    def run(self, query: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        key, value = paged_kv_cache
        assert (query.shape[1], key.shape[2], query.shape[2], key.shape[1]) == self.sizes
        assert (query.dtype, key.dtype) == self.dtypes
        assert len(query) == self.rows.query_start[-1]
        self.num_runs += 1
        return paged_attention(query, key, value, self.rows, None, self.options, None)[0]


class StandIn:
    """The package; keeps the wrappers it made."""

    def __init__(self) -> None:
        self.wrappers: list[StandInWrapper] = []

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: Tensor, kv_layout: str) -> StandInWrapper:
        self.wrappers.append(StandInWrapper(workspace, kv_layout))
        return self.wrappers[-1]


ROWS = (RowSpec(150, 5), RowSpec(70, 1, True), RowSpec(90), RowSpec(64, 30), RowSpec(0, 0), RowSpec(33, 1, True),
        RowSpec(96, 96), RowSpec(48, 17))
PROBED = (5, 1, 1, 0, 0, 1, 17, 17)


def make(window: int | None = None, softcap: float | None = None, *, drafts: bool = False) -> AttentionCase:
    """A mixed step with probes of what the host says may be probed; drafts: of the drafting rows too."""
    case = make_case(CaseSpec(ROWS, head_dim=64, window=window, softcap=softcap, spare_tokens=2), seed=3)
    slots, starts = case.rows.slot.tolist(), case.rows.query_start.tolist()
    host = tuple(HostRow(slot, row.num_queries, None, probed)
                 for slot, row, probed in zip(slots, ROWS, PROBED, strict=True))
    pairs = [(r, starts[r + 1] - 1) for r, count in enumerate(PROBED) if count and (drafts or not ROWS[r].sparse)]
    token = torch.tensor([[last, last - 1 if ROWS[r].num_queries > 1 else -1] for r, last in pairs] + [[-1, -1]])
    logits = torch.full((len(token), 2, 6, case.rows.max_kv_len), torch.nan)
    probe = Probe(token.int(), torch.tensor([r for r, _ in pairs] + [-1], dtype=torch.int32), logits)
    return replace(case, rows=replace(case.rows, host=host), probe=probe)


def backend_with(library: StandIn) -> FlashInferAttention:
    return FlashInferAttention(ReferenceAttention(), library, dtypes=(torch.float32,))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (33, None), (None, 5.0)], ids=["all", "window", "cap"])
@pytest.mark.parametrize("probed", [False, True], ids=["", "probed"])
@pytest.mark.parametrize("restricted", [False, True], ids=["all", "lists"])
def test_equals_one_backend(window: int | None, softcap: float | None, restricted: bool, probed: bool) -> None:
    """Planted faults: pages counted for the whole row where its probed queries stay behind; window_left one too large;
    the second row's pages looked up in the first slot; drafting rows taken although their query is probed."""
    case, library = make(window, softcap, drafts=probed and not restricted), StandIn()
    selection, probe = case.selection if restricted else None, case.probe if probed else None
    args = (case.query, case.key_cache, case.value_cache, case.rows, selection, case.options, probe)
    expected, expected_lse = ReferenceAttention().attend(*args)
    logits = case.probe.logits.clone() if case.probe is not None else None
    assert case.probe is not None
    case.probe.logits.fill_(torch.nan)
    out, lse = backend_with(library).attend(*args)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)
    served = [int(count) for wrapper in library.wrappers for count in wrapper.rows.query_start.diff()]
    full = [row.num_queries - (count if probed else 0) for row, count in zip(ROWS, PROBED, strict=True)
            if not (row.sparse and restricted)]
    assert served == [count for count in full if count]
    if probed:
        assert lse is not None
        assert expected_lse is not None
        torch.testing.assert_close(case.probe.logits, logits, equal_nan=True)
        used = case.probe.token[case.probe.token >= 0].long()
        torch.testing.assert_close(lse[used], expected_lse[used])


def test_a_step_is_planned_once_for_each_kind_of_layer() -> None:
    """Planted fault: a plan made for the step before used again."""
    case, library = make(), StandIn()
    backend = backend_with(library)
    other = replace(case, rows=replace(case.rows, kv_len=(case.rows.kv_len - 1).clamp(min=0)))
    for step in (case, case, other):
        for selection, probe in ((None, None), (case.selection, case.probe), (case.selection, None)) * 2:
            args = (step.query, step.key_cache, step.value_cache, step.rows, selection, step.options, probe)
            torch.testing.assert_close(backend.attend(*args)[0], ReferenceAttention().attend(*args)[0])
    assert [wrapper.num_plans for wrapper in library.wrappers] == [2, 2, 2]
    assert [wrapper.num_runs for wrapper in library.wrappers] == [6, 6, 6]


def test_eight_bit_caches_are_scaled_back() -> None:
    """Planted fault: value_scale left out."""
    case, library = make(), StandIn()
    caches = [cache.nan_to_num().to(torch.float8_e4m3fn) for cache in (case.key_cache, case.value_cache)]
    options = replace(case.options, key_scale=0.5, value_scale=2.0)
    args = (case.query, *caches, case.rows, None, options, None)
    torch.testing.assert_close(backend_with(library).attend(*args)[0], ReferenceAttention().attend(*args)[0])
    assert library.wrappers[0].num_runs == 1


def test_what_the_package_does_not_know_goes_to_the_other_backend() -> None:
    """float32 and odd head dims. Planted fault: the head dim not asked."""
    library = StandIn()
    for case, backend in ((make(), FlashInferAttention(ReferenceAttention(), library)),
                          (make_case(CaseSpec(ROWS, head_dim=96), seed=1), backend_with(library))):
        args = (case.query, case.key_cache, case.value_cache, case.rows, None, case.options, None)
        torch.testing.assert_close(backend.attend(*args)[0], ReferenceAttention().attend(*args)[0])
    assert library.wrappers == []


def test_rows_that_the_host_knows_nothing_of_are_not_taken_when_probed() -> None:
    case, library = make(), StandIn()
    args = (case.query, case.key_cache, case.value_cache, replace(case.rows, host=()), None, case.options, case.probe)
    torch.testing.assert_close(backend_with(library).attend(*args)[0], ReferenceAttention().attend(*args)[0])
    assert library.wrappers == []


@pytest.mark.parametrize(("policy", "refresh_every"), [("autoregressive", None), ("aspire", 2), ("aspire-paper", None)])
def test_tokens_of_an_engine(policy: str, refresh_every: int | None, tmp_path: Path) -> None:
    """Planted fault: drafts that renew lists not said to be probed, so that they are taken where only the others of
    the step read lists."""
    bed = tiny_bed(tmp_path, head_dim=64)
    chance = random.Random(0)
    prompts = [[chance.randrange(256) for _ in range(length)] for length in (100, 61, 150, 33)]
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True)
    expected = run(bed.engine({"policy": "autoregressive", "max_num_seqs": 1}), prompts, params)
    config = EngineConfig.from_options(bed.name, {
        "policy": policy, "overrides": Overrides(budget=64, window=32, refresh_every=refresh_every,
                                                 refresh=(0, 1, 2) if policy == "aspire" else None)
        if policy != "autoregressive" else Overrides(), "max_num_seqs": 4, "max_num_batched_tokens": 90,
        "loop": "overlapped"})
    config = config.resolve(device="cpu", model_dtype="float32", model_limit=bed.spec.max_model_len)
    library = StandIn()
    kit = DeviceKit(backend_with(library), reference_operators(), ModelOps())
    outputs = run(assemble(config, bed.spec, bed.model, bed.tokenizer, device=torch.device("cpu"), kit=kit), prompts,
                  params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert sum(wrapper.num_runs for wrapper in library.wrappers) > 10 * bed.spec.num_layers


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match="pip install flashinfer-python"):
        load_flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=StandInWrapper))
    assert load_flashinfer().BatchPrefillWithPagedKVCacheWrapper is StandInWrapper


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """The package itself, where it is installed."""
    from aspire.attention.triton import TritonAttention
    from aspire.testing.attention_checks import TOLERANCE, relative_error

    pytest.importorskip("flashinfer")
    rows = (RowSpec(4100, 9), RowSpec(900, 1, True), RowSpec(3001, 700), RowSpec(517, 517), RowSpec(2049))
    case = make_case(CaseSpec(rows, 32, 8, 128, capacity=512, dtype=torch.bfloat16, device="cuda"), seed=4)
    for selection in (None, case.selection):
        args = (case.query, case.key_cache, case.value_cache, case.rows, selection, case.options, None)
        out, _ = FlashInferAttention(TritonAttention(), load_flashinfer()).attend(*args)
        assert relative_error(out, ReferenceAttention().attend(*args)[0]) < TOLERANCE[torch.bfloat16]
