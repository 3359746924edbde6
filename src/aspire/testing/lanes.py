"""A lane that does everything as late as it may: whoever does not wait for a copy finds it not done."""

from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class LateLane:
    """Work waits until somebody joins a later mark; `finish` does the rest. `begun` counts calls of begin()."""

    def __init__(self) -> None:
        self._queue: deque[Work | int] = deque()  # work, and marks between
        self._marks = 0
        self._settled = 0
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1

    def submit(self, work: Work) -> None:
        assert self.begun, "copies that do not wait for earlier steps"
        self._queue.append(work)

    def mark(self) -> int:
        self._marks += 1
        self._queue.append(self._marks)
        return self._marks

    def join(self, mark: int) -> None:
        while self._settled < mark:
            self._do_next()

    def settled(self) -> int:
        return self._settled

    def finish(self) -> None:
        while self._queue:
            self._do_next()

    def _do_next(self) -> None:
        item = self._queue.popleft()
        if isinstance(item, int):
            self._settled = item
        else:
            item()
