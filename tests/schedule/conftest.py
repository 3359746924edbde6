"""A scheduler with a scripted device: `make_setup(...)`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from aspire.request import Request, SamplingParams, StopChecker
from aspire.schedule.blocks import BlockPool
from aspire.schedule.config import SchedulerConfig
from aspire.schedule.host import HostPool
from aspire.schedule.offload import Offload
from aspire.schedule.scheduler import Scheduler
from aspire.speculation.acceptance import SurvivalEstimator
from aspire.speculation.cadence import Cadence
from aspire.speculation.cost import CostModel, kv_shape
from aspire.speculation.layers import per_layer_lists
from aspire.speculation.selection import SelectionConfig
from aspire.testing.schedule import ScriptedDevice


class RecordingEstimator(SurvivalEstimator):
    """Keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[tuple[str, int, int]] = []
        self.noted: list[tuple[str, int, float | None]] = []
        self.forgotten: list[str] = []

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        self.observed.append((request_id, num_drafted, num_accepted))
        super().observe(request_id, num_drafted, num_accepted)

    def note_draft(self, request_id: str, position: int, margin: float | None) -> None:
        self.noted.append((request_id, position, margin))
        super().note_draft(request_id, position, margin)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)
        super().forget(request_id)


@dataclass
class Setup:
    """`token` gives a request's whole text: its prompt, then picks drawn from its name and the position."""

    scheduler: Scheduler
    device: ScriptedDevice
    acceptance: RecordingEstimator
    prompts: dict[str, list[int]] = field(default_factory=dict)

    def token(self, name: str, position: int) -> int:
        prompt = self.prompts[name]
        return prompt[position] if position < len(prompt) else Random(f"{name}/{position}").randrange(50)

    def output(self, request: Request) -> list[int]:
        """What plain decoding gives, up to the length that the request has."""
        return [self.token(request.request_id, p) for p in range(request.num_prompt, request.num_known)]

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, *, priority: int = 0,
            stop_checker: StopChecker | None = None, leader: Request | None = None,
            params: SamplingParams | None = None) -> Request:
        request = Request(name, prompt, params or SamplingParams(), max_total=len(prompt) + max_tokens,
                          priority=priority, stop_checker=stop_checker, leader=leader)
        self.prompts[name] = list(prompt)
        self.scheduler.add(request)
        return request


MakeSetup = Callable[..., Setup]


@pytest.fixture(scope="session")
def make_setup() -> MakeSetup:
    """A function without state, so that property tests may use it."""
    return build_setup


def build_setup(cadence: Cadence, *, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 4,
                budget: int = 64, lag: int = 0,
                accepted: Mapping[str, int] | Callable[[str, int, int], int] | None = None,
                sparse_emits: bool = False, prefix_caching: bool = True, host_blocks: int = 0,
                copies_per_step: int = 8) -> Setup:
    """accepted: drafts a verification accepts, by request; all by default. host_blocks: 0 offloads nothing."""
    lookahead = (cadence.draft_limit + 1) * (1 + lag)
    config = SchedulerConfig(max_num_seqs, budget, 4096, block_size, lookahead, sparse_emits)
    cost = CostModel(base=1e-4, weights=1e-3, per_token=1e-5, per_byte=1e-12,
                     kv=kv_shape(per_layer_lists(4), SelectionConfig(), 256))
    acceptance = RecordingEstimator()
    pool = BlockPool(num_blocks, block_size, prefix_caching)
    offload = Offload(HostPool(host_blocks), copies_per_step) if host_blocks else None
    scheduler = Scheduler(config, pool, cadence, acceptance=acceptance, cost=cost, offload=offload)

    def accept(name: str, position: int, num_drafted: int) -> int:
        if callable(accepted):
            return accepted(name, position, num_drafted)
        return num_drafted if accepted is None else accepted.get(name, num_drafted)

    def token(name: str, position: int) -> int:
        return setup.token(name, position)

    setup = Setup(scheduler, ScriptedDevice(block_size, token, accept), acceptance)
    return setup
