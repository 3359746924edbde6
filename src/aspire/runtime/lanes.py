"""Lanes: where copies run beside the steps, and how steps wait for them. Knows nothing of blocks.

Work of a lane runs in the order in which it was submitted. Marks are numbers that grow from 1: whoever waits for one
waits for all work submitted before it.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Lane(Protocol):
    """One more queue of work besides that of the steps."""

    def begin(self) -> None:
        """What is submitted from now on starts after all that the steps were given until now."""

    def submit(self, work: Work) -> None: ...

    def mark(self) -> int:
        """Of all the work submitted until now."""

    def join(self, mark: int) -> None:
        """What the steps are given from now on starts after the mark's work; the host does not wait."""

    def settled(self) -> int:
        """The last mark whose work has ended, or that the steps wait for anyway."""


class InlineLane:
    """Runs work at once: on the CPU, where copies and steps share the cores."""

    def __init__(self) -> None:
        self._marks = 0

    def begin(self) -> None:
        """The steps' work has ended."""

    def submit(self, work: Work) -> None:
        work()

    def mark(self) -> int:
        self._marks += 1
        return self._marks

    def join(self, mark: int) -> None:
        """The work has ended."""

    def settled(self) -> int:
        return self._marks


class StreamLane:
    """A CUDA stream beside the current one, ordered with it by events."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()  # of marks that are not settled
        self._marks = 0
        self._settled = 0

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def submit(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> int:
        self._marks += 1
        event = torch.cuda.Event()
        event.record(self._stream)
        self._events.append((self._marks, event))
        return self._marks

    def join(self, mark: int) -> None:
        if mark <= self._settled:
            return
        while self._events[0][0] < mark:
            self._events.popleft()
        self._settled, event = self._events.popleft()
        torch.cuda.current_stream().wait_event(event)

    def settled(self) -> int:
        while self._events and self._events[0][1].query():
            self._settled, _ = self._events.popleft()
        return self._settled
