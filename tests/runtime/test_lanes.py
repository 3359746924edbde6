"""StreamLane and locked memory against stand-ins for CUDA: which calls they make, in which order."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aspire.runtime.host_memory import host_memory
from aspire.runtime.lanes import StreamLane

CUDA = torch.device("cuda")


class FakeCuda:
    """Keeps a log; events pass when the test says so."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.passed: set[int] = set()
        self.current = "steps"
        self.num_events = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        fake = self

        class Event:
            def __init__(self) -> None:
                fake.num_events += 1
                self.number = fake.num_events

            def record(self, stream: "Stream") -> None:
                fake.log.append(("record", self.number, stream.name))

            def query(self) -> bool:
                return self.number in fake.passed

        class Stream:
            def __init__(self, device: torch.device | None = None, name: str = "copies") -> None:
                self.name = name

            def wait_stream(self, other: "Stream") -> None:
                fake.log.append(("wait_stream", self.name, other.name))

            def wait_event(self, event: Event) -> None:
                fake.log.append(("wait_event", self.name, event.number))

        @contextmanager
        def use(stream: Stream) -> Iterator[None]:
            before, fake.current = fake.current, stream.name
            yield
            fake.current = before

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", use)
        patch.setattr(torch.cuda, "current_stream", lambda: Stream(name=fake.current))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_copies_wait_for_steps_and_steps_for_copies(cuda: FakeCuda) -> None:
    """Planted faults: begin() with the streams exchanged; join() on the lane's own stream; a mark recorded on the
    current stream, which says nothing of the copies."""
    lane = StreamLane(CUDA)
    lane.begin()
    lane.submit(lambda: cuda.log.append(("work", cuda.current)))
    first, second = lane.mark(), lane.mark()
    lane.join(second)
    assert cuda.log == [("wait_stream", "copies", "steps"), ("work", "copies"), ("record", 1, "copies"),
                        ("record", 2, "copies"), ("wait_event", "steps", 2)]
    assert (first, second, lane.settled()) == (1, 2, 2)


def test_nothing_is_waited_for_twice(cuda: FakeCuda) -> None:
    """Planted faults: join() without its first line, which then looks for an event that is gone; settled() that does
    not stop at the first event under way."""
    lane = StreamLane(CUDA)
    marks = [lane.mark() for _ in range(4)]
    cuda.passed = {1, 3}
    assert lane.settled() == 1
    lane.join(marks[2])
    lane.join(marks[1])
    lane.join(marks[0])
    assert [entry for entry in cuda.log if entry[0] == "wait_event"] == [("wait_event", "steps", 3)]
    assert lane.settled() == 3
    cuda.passed = {4}
    assert lane.settled() == 4
    lane.join(marks[3])
    assert len([entry for entry in cuda.log if entry[0] == "wait_event"]) == 1


def fake_cudart(log: list[Any], error: int) -> Any:
    def register(address: int, size: int, flags: int) -> int:
        log.append(("lock", address, size, flags))
        return error

    return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: log.append(("free", address)))


def test_exactly_what_is_needed_is_locked_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: unlocked when host_memory() returned."""
    log: list[Any] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake_cudart(log, 0))
    tensor = host_memory((3, 4, 5), CUDA)
    address = tensor.data_ptr()
    assert log == [("lock", address, 60, 0)]
    view = tensor[1:]
    del tensor
    gc.collect()
    assert len(log) == 1, "a view needs it"
    del view
    gc.collect()
    assert log[1:] == [("free", address)]


def test_memory_that_cannot_be_locked_is_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the status not looked at."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake_cudart([], 2))
    with pytest.raises(ValueError, match=r"kv_offload_gb must be less than .* got 0.0 GiB \(CUDA error 2\)"):
        host_memory((8,), CUDA)
