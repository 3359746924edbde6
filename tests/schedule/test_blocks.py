"""BlockPool against a slow model that remembers which prefix every block holds."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from aspire.schedule.blocks import BlockPool, hash_block


def reader(tokens: Sequence[int]) -> Callable[[int, int], Sequence[int]]:
    return lambda start, stop: tokens[start:stop]


def fill(pool: BlockPool, name: str, tokens: list[int]) -> tuple[int, ...]:
    """Allocate, compute and register all of `tokens`."""
    allocation = pool.allocate(name, tokens, len(tokens))
    assert allocation is not None
    pool.register(name, len(tokens), reader(tokens))
    return allocation.blocks


def test_match_finds_whole_blocks_but_never_the_last_token() -> None:
    """Planted fault: `len(token_ids) // size` blocks may match: a prompt found whole has no logits to sample from."""
    pool = BlockPool(8, 4)
    blocks = fill(pool, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 8]) == blocks[:1]
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 8, 0]) == blocks[:2]
    assert pool.match([1, 2, 3, 0, 5, 6, 7, 8, 9]) == ()
    assert pool.match([5, 6, 7, 8, 9]) == (), "the same tokens after another prefix are another block"


def test_salt_separates_prefixes() -> None:
    """Planted fault: the salt is left out of the first block's hash."""
    pool = BlockPool(8, 2)
    allocation = pool.allocate("a", [1, 2, 3], 3, salt=b"tenant")
    assert allocation is not None
    pool.register("a", 3, reader([1, 2, 3]))
    assert pool.match([1, 2, 3]) == ()
    assert pool.match([1, 2, 3], salt=b"tenant") == allocation.blocks[:1]


def test_block_hash_is_stable_across_processes() -> None:
    """Planted fault: Python's salted hash(). The constant was computed once."""
    assert hash_block(hash_block(b"", (1, 2)), (3, -1)).hex() == "092702c7cdddfd0098b45538b2562957"


def test_only_registered_blocks_are_found() -> None:
    """Planted fault: register() rounds num_computed up, so a block that is still being written is shared."""
    pool = BlockPool(8, 4)
    tokens = list(range(10))
    allocation = pool.allocate("a", tokens, 12)
    assert allocation is not None
    assert pool.match([*tokens, 0]) == ()
    pool.register("a", 7, reader(tokens))
    assert pool.match([*tokens, 0]) == allocation.blocks[:1]
    pool.register("a", 8, reader(tokens))
    assert pool.match([*tokens, 0]) == allocation.blocks[:2]


def test_register_reads_each_token_once() -> None:
    """Planted fault: register() hashes from the first block every time: O(context) for each new block."""
    pool = BlockPool(16, 4)
    tokens = list(range(64))
    pool.allocate("a", tokens, 64)
    reads: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> Sequence[int]:
        reads.append((start, stop))
        return tokens[start:stop]

    for num_computed in range(65):
        pool.register("a", num_computed, read)
    assert reads == [(start, start + 4) for start in range(0, 64, 4)]


def test_sharing_counts_references() -> None:
    """Planted fault: release() frees a block although somebody else holds it."""
    pool = BlockPool(5, 2)
    first = fill(pool, "a", [1, 2, 3, 4, 5])
    allocation = pool.allocate("b", [1, 2, 3, 4, 6], 5)
    assert allocation is not None
    assert (allocation.blocks[:2], allocation.num_cached_tokens) == (first[:2], 4)
    assert allocation.blocks[2] != first[2]
    pool.release("a")
    pool.check()
    assert pool.num_free == 2, "b still holds three"
    assert pool.match([1, 2, 3, 4, 9]) == first[:2]


def test_least_recently_released_prefix_is_evicted_first_and_its_end_before_its_beginning() -> None:
    """Planted faults: popitem() from the wrong end; release() in table order, which evicts a prefix's beginning."""
    pool = BlockPool(5, 2)
    old, new = [1, 2, 3, 4], [5, 6, 7, 8]
    fill(pool, "old", old)
    fill(pool, "new", new)
    pool.release("old")
    pool.release("new")
    assert pool.num_free == 5
    pool.allocate("x", [9] * 3, 4)  # takes the blank block, then one cached
    assert (len(pool.match([*old, 0])), len(pool.match([*new, 0]))) == (1, 2)
    pool.check()


def test_revived_blocks_do_not_count_as_free() -> None:
    """Planted fault: matched blocks that nobody holds are counted as free for the rest of the table as well."""
    pool = BlockPool(3, 2)
    fill(pool, "a", [1, 2, 3, 4])
    pool.release("a")
    assert pool.num_free == 3
    assert pool.allocate("b", [1, 2, 3, 4, 5], 8) is None, "2 shared + 2 more, but only 1 is left"
    assert pool.num_held("b") == 0
    assert pool.num_free == 3
    assert pool.allocate("b", [1, 2, 3, 4, 5], 6) is not None
    pool.check()


def test_refused_growth_changes_nothing() -> None:
    """Planted fault: grow() takes what there is before it refuses."""
    pool = BlockPool(4, 2)
    pool.allocate("a", [1, 2, 3], 4)
    pool.allocate("b", [7], 2)
    before = pool.blocks("a")
    assert pool.grow("a", 8) is None
    assert (pool.blocks("a"), pool.num_free) == (before, 1)
    assert pool.grow("a", 4) == ()
    new = pool.grow("a", 5)
    assert new is not None
    assert pool.blocks("a") == (*before, *new)
    pool.check()


def test_truncate_keeps_registered_blocks() -> None:
    """Planted fault: truncate() lets registered blocks go while the table's hash chain still counts them."""
    pool = BlockPool(4, 2)
    pool.allocate("a", [1, 2, 3], 8)
    pool.register("a", 3, reader([1, 2, 3]))
    pool.truncate("a", 3)
    assert (pool.num_held("a"), pool.num_free) == (2, 2)
    with pytest.raises(AssertionError, match="loses registered blocks"):
        pool.truncate("a", 0)


def test_without_prefix_caching_nothing_is_shared() -> None:
    """Planted faults: the switch is ignored by register(), or by match()."""
    pool = BlockPool(4, 2, enable_prefix_caching=False)
    pool.allocate("a", [1, 2, 3], 3)

    def read(start: int, stop: int) -> Sequence[int]:
        raise AssertionError("hashed for nothing")

    pool.register("a", 3, read)
    assert pool.match([1, 2, 3]) == ()
    pool.release("a")
    assert pool.match([1, 2, 3]) == ()
    pool.check()


@pytest.mark.parametrize("size", [(0, 16), (4, 0), (-1, 1)])
def test_impossible_sizes_are_refused(size: tuple[int, int]) -> None:
    """Planted fault: a pool of no blocks is built and refuses every request with a riddle."""
    with pytest.raises(ValueError, match="must be an integer >= 1, got"):
        BlockPool(*size)


def test_check_sees_a_lost_and_a_doubly_owned_block() -> None:
    """The check itself: both faults are planted here, in the pool's own state."""
    lost = BlockPool(3, 2)
    lost._blank.pop()
    with pytest.raises(AssertionError, match="lost"):
        lost.check()
    double = BlockPool(3, 2)
    double.allocate("a", [1], 2)
    double.allocate("b", [2], 2)
    double._tables["b"].blocks[0] = double._tables["a"].blocks[0]
    with pytest.raises(AssertionError):
        double.check()


class PoolMachine(RuleBasedStateMachine):
    """The model: every request's tokens and size, and for every block the prefix (all tokens up to its end) it is
    findable by. Planted faults it caught: no `del self._block_of[...]` at eviction; `_refs` not raised for a match;
    the parent left out of the hash."""

    names: Bundle[str] = Bundle("names")

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 3]))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tokens: dict[str, list[int]] = {}
        self.held: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.count = 0

    def taken(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert all(block not in table for table in self.held.values()), f"block {block} has an owner"
            self.prefix_of.pop(block, None)

    @rule(target=names, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), extra=st.integers(0, 5))
    def allocate(self, tokens: list[int], extra: int) -> str:
        name = f"r{self.count}"
        self.count += 1
        size = self.pool.block_size
        block_of = {prefix: block for block, prefix in self.prefix_of.items()}
        expected: list[int] = []
        while (len(expected) + 1) * size < len(tokens) and tuple(tokens[:(len(expected) + 1) * size]) in block_of:
            expected.append(block_of[tuple(tokens[:(len(expected) + 1) * size])])
        assert list(self.pool.match(tokens)) == expected
        num_needed = -(-(len(tokens) + extra) // size) - len(expected)
        owned = {block for table in self.held.values() for block in table}
        allocation = self.pool.allocate(name, tokens, len(tokens) + extra)
        assert (allocation is None) == (num_needed > self.pool.num_blocks - len(owned | set(expected)))
        if allocation is None:
            return name
        assert list(allocation.blocks[:len(expected)]) == expected
        assert allocation.num_cached_tokens == len(expected) * size
        self.taken(allocation.blocks[len(expected):])
        self.tokens[name], self.held[name] = tokens, list(allocation.blocks)
        self.computed[name] = allocation.num_cached_tokens
        return name

    @rule(name=names, more=st.integers(0, 6))
    def grow(self, name: str, more: int) -> None:
        if name not in self.held:
            return
        target = len(self.held[name]) * self.pool.block_size + more
        free = self.pool.num_free
        new = self.pool.grow(name, target)
        assert (new is None) == (-(-more // self.pool.block_size) > free)
        if new is not None:
            self.taken(new)
            self.held[name] += new

    @rule(name=names, less=st.integers(0, 6))
    def truncate(self, name: str, less: int) -> None:
        if name not in self.held:
            return
        size = self.pool.block_size
        target = max(len(self.held[name]) * size - less, len(self.tokens[name]))
        self.pool.truncate(name, target)
        del self.held[name][-(-target // size):]

    @rule(name=names, more=st.integers(0, 9))
    def register(self, name: str, more: int) -> None:
        if name not in self.held:
            return
        tokens, size = self.tokens[name], self.pool.block_size
        self.computed[name] = min(self.computed[name] + more, len(tokens))
        self.pool.register(name, self.computed[name], reader(tokens))
        for index in range(self.computed[name] // size):
            prefix = tuple(tokens[:(index + 1) * size])
            if prefix not in self.prefix_of.values():
                self.prefix_of[self.held[name][index]] = prefix

    @rule(name=consumes(names))
    def release(self, name: str) -> None:
        if name in self.held:
            self.pool.release(name)
            del self.held[name], self.tokens[name], self.computed[name]

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert {name: list(self.pool.blocks(name)) for name in self.held} == self.held
        owned = {block for table in self.held.values() for block in table}
        assert self.pool.num_free == self.pool.num_blocks - len(owned)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_pool_against_model = PoolMachine.TestCase
