"""A packed outcome becomes the verdicts of its plan, and host buffers are not taken while a copy uses them."""

import pytest
import torch

from aspire.ops.judge.reference import pack_verdicts
from aspire.runtime.judges import Outcome
from aspire.runtime.staging import IN_FLIGHT, Staging
from aspire.runtime.verdicts import PendingStep, to_host
from aspire.schedule.plan import Row, RowKind, StepPlan, Verdict

CPU = torch.device("cpu")
ROWS = (Row("a", 0, RowKind.FULL, 9, 4, 3, True), Row("b", 1, RowKind.SPARSE, 20, 1, 1, True, (), False),
        Row("c", 2, RowKind.FULL, 0, 2, 0, False, (5, 6), False), Row("d", 3, RowKind.FULL, 4, 1, 0, True, (7,)))
PICKS = torch.tensor([[11, 12, 13, 14], [21, 0, 0, 0], [31, 0, 0, 0], [41, 0, 0, 0], [9, 9, 9, 9]])


def pending(margin: list[float]) -> PendingStep:
    """The rows above and one of padding."""
    packed = pack_verdicts(PICKS, torch.tensor([2, 0, 0, 0, 0]), torch.tensor(margin))
    return PendingStep(StepPlan(3, ROWS), to_host(Outcome(packed), Staging(CPU)))


def test_verdicts_of_every_kind_of_row() -> None:
    """Planted faults: the bonus token left out; a drafting row's pick taken for output; the margin's bits converted."""
    margin = 0.1 + torch.finfo(torch.float32).eps
    assert pending([1.0, margin, float("nan"), 2.0, float("nan")]).verdicts() == [
        Verdict("a", (11, 12, 13), 3), Verdict("b", draft_margin=torch.tensor(margin).item()), Verdict("c"),
        Verdict("d", (41,))]


def test_lost_logits_name_their_requests() -> None:
    """A row that samples nothing may hold anything. Planted fault: asked of every row."""
    with pytest.raises(RuntimeError, match=r"step 3: the model's logits are NaN for b, d$"):
        pending([1.0, float("nan"), float("nan"), float("nan"), 1.0]).verdicts()


@pytest.mark.gpu
def test_buffers_come_around_after_the_steps_in_flight() -> None:
    """Planted fault: a single buffer."""
    device = torch.device("cuda")
    staging = Staging(device)
    copies = []
    for step in range(8):
        host = staging.claim(1 << (10 + step % 3), torch.int32)
        host.fill_(step)
        copies.append((step, staging.copy(host), host.data_ptr()))
    assert all((tensor == step).all() for step, tensor, _ in copies)
    places = [place for _, _, place in copies[-(IN_FLIGHT + 1) :]]
    assert len(set(places)) == IN_FLIGHT + 1


def test_the_cpu_gives_fresh_memory() -> None:
    """Views of a packed step may be kept there. Planted fault: the ring used on the CPU too."""
    staging = Staging(CPU)
    hosts = [staging.claim(4, torch.int64).fill_(step) for step in range(6)]
    assert [staging.copy(host)[0].item() for host in hosts] == list(range(6))
    assert staging.mark() is None
