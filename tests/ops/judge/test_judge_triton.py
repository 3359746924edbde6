"""The Triton judge against the reference."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from aspire.ops.judge import reference
from aspire.ops.judge import triton as compiled

pytestmark = [pytest.mark.interpret] if os.environ.get("TRITON_INTERPRET") == "1" else [pytest.mark.gpu]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("limit", [0, 1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_equals_the_reference(limit: int, dtype: torch.dtype) -> None:
    """Two-token vocabulary, so that runs of every length occur; drafts are a view into a wider table.

    Fails when stale entries past num_drafted count as misses or as agreement."""
    generator = torch.Generator().manual_seed(limit)
    picks = torch.randint(0, 2, (64, limit + 1), generator=generator)
    table = torch.where(torch.rand(64, limit + 2, generator=generator) < 0.15, 7, -1)
    table[:, 1 : limit + 1] = torch.where(table[:, 1 : limit + 1] == 7, 7, picks[:, :limit])
    num_drafted = torch.randint(0, limit + 1, (64,), generator=generator).to(dtype)
    drafts = table[:, 1 : limit + 1]
    expected = reference.judge(picks, drafts, num_drafted)
    got = compiled.judge(picks.to(DEVICE), table.to(DEVICE)[:, 1 : limit + 1], num_drafted.to(DEVICE))
    assert torch.equal(got.cpu(), expected)
    assert got.dtype == torch.int32
    assert limit < 3 or len(set(expected.tolist())) > 2
