"""HostPool: which block of host memory keeps which content. Contents go by the keys of blocks.py's hash chain.

Knows nothing of device blocks, copies or tensors.

    a host block is blank or keeps one content; a content is
        claimed   requests that were preempted wait for it: only a later preemption may drive it out
        loose     nobody waits for it: kept, as a second prefix cache, until somebody needs the room
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence


class HostPool:
    """A fixed number of host blocks. Of a run of keys the first ones matter most: a prefix without its beginning is
    worth nothing, so what is stored and what is driven out goes by that."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be an integer >= 1, got {num_blocks!r}")
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack, lowest block on top
        self._block_of: dict[bytes, int] = {}
        self._loose: OrderedDict[bytes, None] = OrderedDict()  # the first goes first
        self._num_claims: dict[bytes, int] = {}
        self._claims: OrderedDict[str, list[bytes]] = OrderedDict()  # who waits longest comes first

    def __contains__(self, key: object) -> bool:
        return key in self._block_of

    @property
    def num_used(self) -> int:
        """Host blocks that keep something."""
        return self.num_blocks - len(self._blank)

    @property
    def claimants(self) -> tuple[str, ...]:
        """Requests that wait for contents, longest first."""
        return tuple(self._claims)

    def block(self, key: bytes) -> int:
        """Where the content of `key` is. KeyError when it is not here."""
        return self._block_of[key]

    def keep(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Find room for contents that nobody waits for, at the cost of older loose ones. Returns (index in keys, host
        block) of what is now to be copied: not what is here already, nor what finds no room."""
        own = set(keys)
        for key in reversed(keys):
            if key in self._loose:
                self._loose.move_to_end(key)
        placed = self._place(keys, lambda: next((key for key in self._loose if key not in own), None))
        self._loose.update((keys[index], None) for index, _block in placed)
        for key in reversed(keys):
            if key in self._loose:
                self._loose.move_to_end(key)
        return placed

    def claim(self, request_id: str, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """As `keep`, for a preempted request: what finds room stays until `disclaim`, or until other claims need the
        room and this one is the oldest."""
        assert request_id not in self._claims, f"{request_id!r} has claimed already"
        held = [key for key in keys if key in self._block_of]
        for key in held:
            self._raise_claim(key)
        placed = self._place(keys, self._cheapest)
        for index, _block in placed:
            self._raise_claim(keys[index])
            held.append(keys[index])
        self._claims[request_id] = held
        return placed

    def disclaim(self, request_id: str) -> None:
        """The request came back or ended: what it waited for is loose now. Without effect when it claims nothing."""
        for key in reversed(self._claims.pop(request_id, [])):
            self._num_claims[key] -= 1
            if not self._num_claims[key]:
                del self._num_claims[key]
                self._loose[key] = None

    def check(self) -> None:
        """AssertionError unless every block is blank or keeps one content, and every content is loose or claimed."""
        blocks = [*self._blank, *self._block_of.values()]
        assert sorted(blocks) == list(range(self.num_blocks)), "a host block is lost or has two contents"
        held = Counter(key for keys in self._claims.values() for key in keys)
        assert held == Counter(self._num_claims), "claims and their counts disagree"
        states = Counter([*self._loose, *self._num_claims])
        assert states == Counter(list(self._block_of)), "a content is loose and claimed at once, or neither"

    def _place(self, keys: Sequence[bytes], victim: Callable[[], bytes | None]) -> list[tuple[int, int]]:
        """Give the missing ones of `keys` blocks, in order, until neither a blank block nor a victim is left."""
        placed: list[tuple[int, int]] = []
        for index, key in enumerate(keys):
            if key in self._block_of:
                continue
            if not self._blank:
                loser = victim()
                if loser is None:
                    break
                del self._loose[loser]
                self._blank.append(self._block_of.pop(loser))
            self._block_of[key] = self._blank.pop()
            placed.append((index, self._block_of[key]))
        return placed

    def _cheapest(self) -> bytes | None:
        """The next loose content; the oldest claim gives way when there is none."""
        while not self._loose and self._claims:
            self.disclaim(next(iter(self._claims)))
        return next(iter(self._loose), None)

    def _raise_claim(self, key: bytes) -> None:
        self._loose.pop(key, None)
        self._num_claims[key] = self._num_claims.get(key, 0) + 1
