"""The Triton judge against the reference."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from aspire.ops.judge import reference
from aspire.ops.judge import triton as compiled
from aspire.ops.sample.rows import Picks
from aspire.testing.model_op_checks import poisoned_memory
from aspire.testing.step_cases import step_case, step_picks

pytestmark = [pytest.mark.interpret] if os.environ.get("TRITON_INTERPRET") == "1" else [pytest.mark.gpu]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("seed", range(24))
def test_equals_the_reference(seed: int) -> None:
    """All bits, those of NaN apart. Planted faults: stale drafts past num_drafted that count as agreement;
    drafting rows judged; the margin of the last pick."""
    case, there = step_case(seed), step_case(seed, device=DEVICE)
    picks = step_picks(case, seed)
    expected = reference.judge(picks, case.inputs, case.tables.tokens)
    with poisoned_memory():
        got = compiled.judge(Picks(picks.token.to(DEVICE), picks.margin.to(DEVICE)), there.inputs, there.tables.tokens)
    assert got.dtype == expected.dtype
    assert torch.equal(got[:, :-1].cpu(), expected[:, :-1])
    margins = got[:, -1].cpu().view(torch.float32)
    torch.testing.assert_close(margins, expected[:, -1].view(torch.float32), rtol=0, atol=0, equal_nan=True)
