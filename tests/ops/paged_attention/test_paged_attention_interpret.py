"""The Triton kernels under the interpreter, float32, small and odd sizes, poisoned outputs."""

from dataclasses import replace

import pytest
import torch

from aspire.attention.rows import AttentionRows, Probe
from aspire.ops.paged_attention.reference import paged_attention
from aspire.testing.attention_cases import AttentionCase, CaseSpec, RowSpec, make_case

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),  # lanes that no store keeps divide by zero
]

MIX = (RowSpec(150, 5), *(RowSpec(n, 1, True) for n in (140, 77, 3, 61, 130, 99, 150)), RowSpec(0, 0))
CASES = {
    "1 verify in 8": CaseSpec(MIX, sinks=4, probes=2, spare_tokens=3),
    "units of 16": CaseSpec((*MIX, RowSpec(91)), num_heads=8, num_kv_heads=2, unit=16, sinks=16, capacity=4),
    "long chunk beside decoding": CaseSpec((RowSpec(170, 60), RowSpec(140), RowSpec(90, 1, True)), probes=2),
    "window and soft cap": CaseSpec((RowSpec(130, 7), RowSpec(101, 1, True), RowSpec(60, 60)), num_heads=2,
                                    num_kv_heads=1, window=33, softcap=5.0, probes=1),
    "head dim 96": CaseSpec((RowSpec(100, 3), RowSpec(120, 1, True)), num_heads=3, num_kv_heads=1, head_dim=96, unit=4,
                            block_size=8),
    "group of 16": CaseSpec((RowSpec(70, 3), RowSpec(100, 1, True)), num_heads=16, num_kv_heads=1),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, so that what a kernel does not write is seen."""
    empty = torch.empty

    def nan_filled(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", nan_filled)


def run(case: AttentionCase, restricted: bool, **config: object) -> torch.Tensor:
    from aspire.ops.paged_attention.triton import KernelConfig, PagedAttention

    small = KernelConfig(**{"key_tile": 16, "fine": 32, "num_fine": 2, "coarse": 64, "max_tiles": 2,
                            "list_piece": 32, **config})
    selection = case.selection if restricted else None
    expected, expected_lse = paged_attention(case.query, case.key_cache, case.value_cache, case.rows, selection,
                                             case.options, case.probe)
    logits = None
    if case.probe is not None:
        logits = case.probe.logits.clone()
        case.probe.logits.fill_(torch.nan)
    out, lse = PagedAttention(small)(case.query, case.key_cache, case.value_cache, case.rows, selection, case.options,
                                     case.probe)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    if case.probe is None or logits is None or lse is None or expected_lse is None:
        return out
    seen = ~logits.isnan()
    torch.testing.assert_close(case.probe.logits[seen], logits[seen], atol=2e-5, rtol=2e-5)
    used = case.probe.token[case.probe.token >= 0].long()
    torch.testing.assert_close(lse[used], expected_lse[used], atol=2e-5, rtol=2e-5)
    return out


@pytest.mark.parametrize("restricted", [True, False], ids=["sparse", "all"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, restricted: bool) -> None:
    """Planted faults: `c <= position` made `<`; the list's unit not multiplied; a partial without its token."""
    run(make_case(CASES[name], seed=len(name)), restricted)


@pytest.mark.parametrize("held_back", [0.0, 20.0, 1e6], ids=["dealt evenly", "some last", "all last"])
def test_order_of_the_work_list(held_back: float) -> None:
    """Every item once, whatever the order. Planted faults: those held back placed from 0; dealt by the number of all
    short items instead of those between."""
    run(make_case(CASES["1 verify in 8"], seed=3), True, held_back=held_back)


@pytest.mark.parametrize("partial_bytes", [1 << 20, 1], ids=["split", "not split"])
def test_small_tiles_for_rows_of_one_query(partial_bytes: int) -> None:
    """Drafting rows that read everything beside a verification. Planted fault: their probes looked up with the large
    tile's offset."""
    case = make_case(CASES["1 verify in 8"], seed=4)
    probed = replace(case, probe=None if case.probe is None else probe_of_drafts(case))
    run(probed, False, packed_rows=32, small_tiles=True, partial_bytes=partial_bytes)


def probe_of_drafts(case: AttentionCase) -> Probe:
    """One query of each sparse row, and of the verification, padded as in a captured graph."""
    rows = case.rows
    token = torch.where(rows.kv_len > 0, rows.query_start[:-1], -1)[:, None]
    logits = torch.full((len(token), 1, case.query.shape[1], rows.max_kv_len), torch.nan)
    return Probe(token, torch.arange(len(token), dtype=torch.int32), logits)


def test_rows_whose_partials_do_not_fit_are_not_split() -> None:
    """Planted fault: the tiled launch starts at the last piece."""
    run(make_case(CASES["1 verify in 8"], seed=1), True, partial_bytes=6 * 65 * 4 * 12)


def test_bits_do_not_depend_on_the_batch_or_on_drafts_beside() -> None:
    """A token of a verification equals the same token decoded alone. Planted fault: pieces that end at the row's end.
    """
    case = make_case(CaseSpec((RowSpec(150, 5), RowSpec(93), RowSpec(120, 40))), seed=2)
    out = run(case, False, packed_rows=16)
    for row, token in ((0, 4), (0, 1), (2, 39)):
        begin, end = case.rows.query_start[row:row + 2].tolist()
        rows = case.rows
        kv_len = rows.kv_len[row:row + 1] - (end - begin - 1 - token)
        alone = AttentionRows(torch.tensor([0, 1], dtype=torch.int32), kv_len, rows.slot[row:row + 1],
                              rows.sparse[row:row + 1], rows.block_table, rows.tail_start, 1, rows.max_kv_len)
        single = replace(case, query=case.query[begin + token:begin + token + 1], rows=alone, probe=None)
        assert torch.equal(run(single, False, packed_rows=16)[0], out[begin + token])
