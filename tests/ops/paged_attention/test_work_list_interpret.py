"""The work list never outgrows its buffer: records past its end once landed in a step's inputs (docs/log/engine.md)."""

import random

import pytest
import torch

from aspire.attention.rows import AttentionOptions, AttentionRows, RowSelection
from aspire.ops.paged_attention.triton import KernelConfig, PagedAttention
from aspire.ops.paged_attention.work_list import FIELDS, TOKEN_FIELDS

pytestmark = pytest.mark.interpret
OPTIONS = AttentionOptions(0.25)


def make_rows(chance: random.Random, unit: int) -> tuple[AttentionRows, RowSelection, int]:
    """Mixed rows with budgets near the edges of pieces; the host's bound of kv_len is exact."""
    count = chance.randrange(1, 13)
    queries = [chance.choice([1, 1, 1, 1, 1, 5, 17, 0]) for _ in range(count)]
    lens = [max(q, chance.choice([65, 250, 299, 300])) if q else 0 for q in queries]
    capacity = 160 // unit
    tail = [max(0, (n - 20) // unit * unit) if n > 100 else 0 for n in lens]
    num_units = [min(capacity, t // unit) for t in tail]
    units = torch.arange(capacity, dtype=torch.int32).repeat(count, 1)
    blocks = -(-max(lens) // 16) or 1
    rows = AttentionRows(
        torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32), torch.arange(count, dtype=torch.int32),
        torch.tensor([q == 1 for q in queries]), torch.arange(count * blocks, dtype=torch.int32).view(count, blocks),
        torch.tensor(tail, dtype=torch.int32), max(1, *queries), max(1, *lens))
    selection = RowSelection(units, torch.tensor(num_units, dtype=torch.int32), unit, unit if unit > 1 else 0)
    return rows, selection, count * blocks


@pytest.mark.parametrize("seed", range(16))
def test_items_fit_their_buffer(seed: int) -> None:
    """Planted fault: `list_pieces` left out of the size (the overflow then killed the process)."""
    chance = random.Random(seed)
    rows, selection, blocks = make_rows(chance, chance.choice([1, 16]))
    tokens = int(rows.query_start[-1]) + chance.choice([0, 3])  # padding tokens of no row
    if not tokens:
        return
    config = KernelConfig(fine=32, coarse=64, num_fine=2, packed_rows=chance.choice([None, 64]),
                          list_piece=chance.choice([None, 16]), max_tiles=chance.choice([1, 4]))
    attention = PagedAttention(config)
    cache = torch.randn(blocks, 16, 1, 16)
    query = torch.randn(tokens, 3, 16)
    for chosen in (selection, None):
        geometry = attention._geometry(query, cache, rows, chosen, OPTIONS)
        plan = attention._plan(rows, geometry, query, 1)
        items, tiled = plan.counters[:2].tolist()
        assert items * FIELDS.value <= plan.items.numel()
        assert tiled * FIELDS.value <= plan.tiled_items.numel()
        assert plan.tokens.numel() == tokens * TOKEN_FIELDS.value
