"""Offload: contents of blocks that their owners gave back are kept in host memory, and return from there.

Decides what is copied and when a request may count on it; who holds which device block is blocks.py's business.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aspire.schedule.host import HostPool
from aspire.schedule.plan import BlockCopy, Direction


@dataclass(frozen=True, slots=True)
class CopyPrice:
    """Seconds, of one block: copying it back from host memory, and computing its tokens anew; and of a decoding step.

    Both grow with the number of blocks (attention makes computing dearer than that), so whether copying pays does not
    depend on the request. It is the latency of the two that is compared: copies also leave the processors to others.
    """

    copy: float
    compute: float
    step: float

    @property
    def pays(self) -> bool:
        return self.copy < self.compute

    @property
    def copies_per_step(self) -> int:
        """Copies that a step hides; at least one, so that they get on."""
        return max(1, int(self.step / self.copy))


class Offload:
    """Copies are queued in the order of the decisions behind them and carried out in that order. So a host block may
    be given to another content, or a request that waits for it aborted, while copies of it are under way: whatever
    touches the block later comes later.

    `copies_per_step`: how many copies a step is taken to hide. A plan must not depend on how fast the machine really
    was, so this guess alone decides how many steps a request lets others go on while its blocks travel; that it reads
    nothing too early is the runner's business.
    """

    def __init__(self, host: HostPool, copies_per_step: int) -> None:
        assert copies_per_step >= 1, "copies must get on"
        self.host = host
        self._copies_per_step = copies_per_step
        self._queue: list[BlockCopy] = []
        self._copy_of: dict[int, int] = {}  # device block -> number of the last copy from or to it, counted from 1
        self._num_queued = 0
        self._num_launched = 0
        self._num_through = 0

    def begin_step(self) -> None:
        """A step has passed since the last plan: so many more copies are taken to be through."""
        self._num_through = min(self._num_launched, self._num_through + self._copies_per_step)
        if self._num_through == self._num_queued:
            self._copy_of.clear()

    def save(self, request_id: str, contents: Sequence[tuple[int, bytes]]) -> None:
        """A request was preempted: its blocks, with their keys, go to the host as far as there is room."""
        self._send(contents, self.host.claim(request_id, [key for _block, key in contents]))

    def keep(self, contents: Sequence[tuple[int, bytes]]) -> None:
        """A request has ended: others may want the beginning of it, if nobody has a better use for the room."""
        self._send(contents, self.host.keep([key for _block, key in contents]))

    def restore(self, request_id: str, missing: Iterable[tuple[int, bytes]]) -> None:
        """A request is seated: what its table lacks comes back. The host's contents stay, for the next preemption."""
        self._enqueue((block, self.host.block(key), Direction.TO_DEVICE) for block, key in missing)
        self.host.disclaim(request_id)

    def last_copy(self, blocks: Iterable[int]) -> int:
        """Number of the last copy from or to any of these device blocks; 0: none is under way."""
        return max((self._copy_of.get(block, 0) for block in blocks), default=0) if self._copy_of else 0

    def is_through(self, copy: int) -> bool:
        return copy <= self._num_through

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """What was queued since the last plan: this plan's copies."""
        copies = tuple(self._queue)
        self._queue.clear()
        self._num_launched = self._num_queued
        return copies

    def check(self, waiting: Sequence[str]) -> None:
        """AssertionError unless the host's books are right and claims belong to requests that wait."""
        self.host.check()
        strays = [name for name in self.host.claimants if name not in waiting]
        assert not strays, f"{strays} claim host blocks and do not wait"
        assert self._num_through <= self._num_launched <= self._num_queued, "copies are through before they began"

    def _send(self, contents: Sequence[tuple[int, bytes]], placed: Sequence[tuple[int, int]]) -> None:
        """The last block first: that is how the pool gives them away, and who gets one waits for its copy."""
        self._enqueue((contents[index][0], host_block, Direction.TO_HOST) for index, host_block in reversed(placed))

    def _enqueue(self, copies: Iterable[tuple[int, int, Direction]]) -> None:
        for block, host_block, direction in copies:
            self._num_queued += 1
            self._copy_of[block] = self._num_queued
            self._queue.append(BlockCopy(block, host_block, direction))
