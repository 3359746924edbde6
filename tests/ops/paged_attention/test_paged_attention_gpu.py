"""Compiled kernels on a GPU: 504 random mixed batches, bits that do not depend on the batch, graph capture."""

from dataclasses import replace

import pytest
import torch

from aspire.attention.rows import AttentionRows
from aspire.testing.attention_cases import AttentionCase, CaseSpec, RowSpec, make_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("index", range(63))
@pytest.mark.parametrize("family", range(8), ids=lambda number: f"family{number}")
def test_random_batches(family: int, index: int) -> None:
    """Planted fault: `pos <= position` made `<` in attend_kernel."""
    from aspire.testing.attention_checks import check_seed

    check_seed(8 * index + family, "cuda")


def test_eight_bit_cache() -> None:
    """Planted fault: value_scale left out."""
    from aspire.ops.paged_attention.reference import paged_attention
    from aspire.ops.paged_attention.triton import PagedAttention
    from aspire.testing.attention_checks import relative_error

    rows = (RowSpec(3000, 5), RowSpec(700), RowSpec(2000, 1, True))
    case = make_case(CaseSpec(rows, 32, 8, 128, capacity=64, dtype=torch.bfloat16, device="cuda"), 0)
    caches = [cache.nan_to_num().to(torch.float8_e4m3fn) for cache in (case.key_cache, case.value_cache)]
    options = replace(case.options, key_scale=0.5, value_scale=2.0)
    args = (case.query, *caches, case.rows, case.selection, options, None)
    assert relative_error(PagedAttention()(*args)[0], paged_attention(*args)[0]) < 8e-3


def only_row(case: AttentionCase, row: int, last: int) -> AttentionCase:
    """The row's token number `last` alone, as if decoding plainly at its place."""
    rows = case.rows
    begin, end = rows.query_start[row:row + 2].tolist()
    ints = {"dtype": torch.int32, "device": "cuda"}
    alone = AttentionRows(
        torch.tensor([0, 1], **ints), rows.kv_len[row:row + 1] - (end - begin - 1 - last), rows.slot[row:row + 1],
        rows.sparse[row:row + 1], rows.block_table, rows.tail_start, 1, rows.max_kv_len)
    return replace(case, query=case.query[begin + last:begin + last + 1].contiguous(), rows=alone, probe=None)


@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64)], ids=["8B", "135M"])
def test_bits_do_not_depend_on_the_batch_or_on_drafts_beside(shape: tuple[int, int, int]) -> None:
    """A token's output is the same alone, in a verification, in a prefill chunk and among other rows.

    Planted fault: pieces counted from the row's own length instead of fixed places.
    """
    from aspire.ops.paged_attention.triton import KernelConfig, PagedAttention

    config = KernelConfig(packed_rows=64)
    heads, kv_heads, dim = shape
    rows = (RowSpec(9000, 9), RowSpec(700, 3), RowSpec(5000, 150), RowSpec(8000, 1, True), RowSpec(4100, 17))
    spec = CaseSpec(rows, heads, kv_heads, dim, sinks=4, capacity=512, dtype=torch.bfloat16, device="cuda")
    case = make_case(spec, 0)
    out, _ = PagedAttention(config)(case.query, case.key_cache, case.value_cache, case.rows, case.selection,
                                    case.options, None)
    for row, spec in enumerate(rows):
        begin = int(case.rows.query_start[row])
        for token in {0, spec.num_queries // 2, spec.num_queries - 1}:
            alone = only_row(case, row, token)
            single, _ = PagedAttention(config)(alone.query, alone.key_cache, alone.value_cache, alone.rows,
                                               alone.selection, alone.options, None)
            assert torch.equal(single[0], out[begin + token]), f"row {row}, token {token}"


def load(static: AttentionCase, case: AttentionCase) -> None:
    """Copy a case into the tensors that a captured graph reads."""
    blocks, width = case.key_cache.shape[0], case.rows.block_table.shape[1]
    static.key_cache[:blocks], static.value_cache[:blocks] = case.key_cache, case.value_cache
    static.rows.block_table[:, :width] = case.rows.block_table
    pairs = ((static.query, case.query), (static.selection.units, case.selection.units),
             (static.selection.num_units, case.selection.num_units), (static.rows.kv_len, case.rows.kv_len),
             (static.rows.slot, case.rows.slot), (static.rows.tail_start, case.rows.tail_start))
    for target, source in pairs:
        target.copy_(source)


def test_a_captured_step_follows_its_inputs() -> None:
    """Lengths, lists and tables change between replays. Planted fault: tickets not reset by the combine kernel."""
    from aspire.ops.paged_attention.triton import PagedAttention

    specs = [CaseSpec(tuple(RowSpec(n + 7 * i, 1 if i else 5, i > 3) for i in range(8)), 32, 8, 128, capacity=64,
                      dtype=torch.bfloat16, device="cuda") for n in (6000, 900)]
    static, *cases = make_case(specs[0], 2), make_case(specs[0], 0), make_case(specs[1], 1)
    attention, graph = PagedAttention(), torch.cuda.CUDAGraph()
    for selection in (static.selection, None):
        attention(static.query, static.key_cache, static.value_cache, static.rows, selection, static.options, None)
    rows = replace(static.rows)  # a new object: the plan kernels belong into the graph
    with torch.cuda.graph(graph):
        outs = [attention(static.query, static.key_cache, static.value_cache, rows, selection, static.options, None)[0]
                for selection in (static.selection, None, static.selection)]
    for case in (cases[0], cases[1], cases[0]):
        load(static, case)
        graph.replay()
        for out, selection in zip(outs, (case.selection, None, case.selection), strict=True):
            expected, _ = PagedAttention()(case.query, case.key_cache, case.value_cache, case.rows, selection,
                                           case.options, None)
            assert torch.equal(out, expected)
