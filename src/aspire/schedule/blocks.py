"""BlockPool: who owns which block of KV memory, and which blocks hold a prefix that others may share.

Knows nothing of requests beyond their ids and token ids, and nothing of tensors.

    one request's table:  [ shared prefix | own, registered | own, being written | reserve ]
                            refs >= 1       refs >= 1         refs == 1            refs == 1
    a block is exactly one of: blank (free, no content), cached (free, content kept until evicted), held (refs >= 1).
"""

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Identity of a full block: its tokens and, through `parent`, everything before it. Stable across processes."""
    return blake2b(parent + struct.pack(f"<{len(token_ids)}q", *token_ids), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Allocation:
    """The blocks of a new table, in order; KV of the first `num_cached_tokens` tokens is there already, but for the
    blocks in `missing`, whose contents by these keys the caller has to bring."""

    blocks: tuple[int, ...]
    num_cached_tokens: int
    missing: tuple[tuple[int, bytes], ...] = ()


@dataclass(slots=True)
class _Table:
    root: bytes  # parent of the first block's hash
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # hashes of the leading blocks, whose tokens are computed

    @property
    def tail(self) -> bytes:
        return self.keys[-1] if self.keys else self.root


class BlockPool:
    """A fixed number of blocks of `block_size` tokens. A refused call changes nothing."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack, lowest block on top
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._refs = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._tables: dict[str, _Table] = {}

    @property
    def num_free(self) -> int:
        """Blocks that a request could get: blank ones and cached ones that nobody holds."""
        return len(self._blank) + len(self._cached)

    @property
    def usage(self) -> float:
        """Held share of the pool, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_held(self, request_id: str) -> int:
        """Blocks in the request's table; 0 when it has none."""
        table = self._tables.get(request_id)
        return len(table.blocks) if table else 0

    def blocks(self, request_id: str) -> tuple[int, ...]:
        """The request's table, in order of position."""
        table = self._tables.get(request_id)
        return tuple(table.blocks) if table else ()

    def match(self, token_ids: Sequence[int], salt: bytes = b"") -> tuple[int, ...]:
        """Blocks that hold the longest known prefix of `token_ids`, never all of it: the last token is always
        recomputed. Changes nothing; hashes no further than the first miss."""
        return tuple(block for block in self._walk(token_ids, salt, ())[1] if block is not None)

    def allocate(self, request_id: str, token_ids: Sequence[int], num_tokens: int, salt: bytes = b"",
                 elsewhere: Container[bytes] = ()) -> Allocation | None:
        """Give a new request a table of `blocks_for(num_tokens)` blocks, sharing the cached prefix of `token_ids`.

        None when there are not enough blocks. `salt` separates prefixes that must not be shared. elsewhere: keys whose
        contents the caller can bring; they prolong the prefix and are findable from now on.
        """
        assert request_id not in self._tables, f"{request_id!r} holds blocks already"
        assert num_tokens >= len(token_ids), "the table must cover the tokens it is asked for"
        keys, found = self._walk(token_ids, salt, elsewhere)
        shared = [block for block in found if block is not None]
        num_new = self.blocks_for(num_tokens) - len(shared)
        num_revived = sum(self._refs[block] == 0 for block in shared)
        if num_new > self.num_free - num_revived:
            return None
        for block in shared:
            self._cached.pop(block, None)
            self._refs[block] += 1
        new = iter(self._take(num_new))
        blocks = [next(new) if block is None else block for block in found]
        missing = tuple((block, key) for block, key, old in zip(blocks, keys, found, strict=True) if old is None)
        for block, key in missing:
            self._name(block, key)
        blocks += new
        self._tables[request_id] = _Table(hash_block(salt, ()), blocks, keys)
        return Allocation(tuple(blocks), len(keys) * self.block_size, missing)

    def contents(self, request_id: str) -> list[tuple[int, bytes]]:
        """The request's computed blocks, in order, with their keys."""
        table = self._tables[request_id]
        return list(zip(table.blocks, table.keys, strict=False))  # the rest of the blocks has no key

    def grow(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Extend the table to cover `num_tokens`; the new blocks, () when it does already, None when refused."""
        table = self._tables[request_id]
        num_new = self.blocks_for(num_tokens) - len(table.blocks)
        if num_new > self.num_free:
            return None
        new = self._take(num_new)
        table.blocks += new
        return tuple(new)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks beyond `num_tokens`; registered blocks may not be cut off."""
        table = self._tables[request_id]
        keep = self.blocks_for(num_tokens)
        assert keep >= len(table.keys), f"{request_id!r}: cut at {num_tokens} tokens loses registered blocks"
        cut = table.blocks[keep:]
        del table.blocks[keep:]
        self._drop(cut)

    def release(self, request_id: str) -> None:
        """Give back the whole table. Registered blocks stay findable until they are evicted, last block first."""
        self._drop(self._tables.pop(request_id).blocks)

    def register(self, request_id: str, num_computed: int, read: Callable[[int, int], Sequence[int]]) -> None:
        """Make the blocks below `num_computed` findable; only tokens whose KV full attention wrote may count.

        read(start, stop): the request's token ids at those positions; asked for new full blocks only, so the cost
        is proportional to what was computed since the last call.
        """
        table = self._tables[request_id]
        size = self.block_size
        first, last = len(table.keys), num_computed // size
        if not self.enable_prefix_caching or last <= first:
            return
        assert last <= len(table.blocks), f"{request_id!r}: {num_computed} tokens computed outside of its blocks"
        token_ids = read(first * size, last * size)
        assert len(token_ids) == (last - first) * size, f"{request_id!r}: computed beyond its known tokens"
        for index in range(first, last):
            offset = (index - first) * size
            table.keys.append(hash_block(table.tail, token_ids[offset:offset + size]))
            if table.tail not in self._block_of:  # a twin computed at the same time stays private
                self._name(table.blocks[index], table.tail)

    def check(self) -> None:
        """Prove the books: every block in exactly one state, references equal to table entries, hashes one to one.
        AssertionError with the culprit otherwise; costs O(num_blocks), for tests and idle time."""
        held = Counter(block for table in self._tables.values() for block in table.blocks)
        for request_id, table in self._tables.items():
            assert len(set(table.blocks)) == len(table.blocks), f"{request_id!r} holds a block twice"
            own = table.blocks[len(table.keys):]
            shared = [block for block in own if held[block] > 1]
            assert not shared, f"{request_id!r} shares blocks {shared} that are still being written"
        assert len(set(self._blank)) == len(self._blank), "a block is blank twice"
        for block in range(self.num_blocks):
            assert self._refs[block] == held[block], f"block {block}: {held[block]} owners, not {self._refs[block]}"
        states = Counter([*self._blank, *self._cached, *held])
        assert states == Counter(range(self.num_blocks)), "a block is lost, or free and held at once"
        assert all(block in self._hash_of for block in self._cached), "a cached block without a hash"
        assert not any(block in self._hash_of for block in self._blank), "a blank block with a hash"
        assert {self._block_of[key]: key for key in self._block_of} == self._hash_of, "hash tables disagree"

    def _walk(self, token_ids: Sequence[int], salt: bytes,
              elsewhere: Container[bytes]) -> tuple[list[bytes], list[int | None]]:
        """Keys of the longest prefix whose blocks are here or elsewhere, and the blocks of those that are here."""
        keys: list[bytes] = []
        blocks: list[int | None] = []
        if not self.enable_prefix_caching:
            return keys, blocks
        size, key = self.block_size, hash_block(salt, ())
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            key = hash_block(key, token_ids[start:start + size])
            block = self._block_of.get(key)
            if block is None and key not in elsewhere:
                break
            keys.append(key)
            blocks.append(block)
        return keys, blocks

    def _name(self, block: int, key: bytes) -> None:
        self._block_of[key] = block
        self._hash_of[block] = key

    def _take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                del self._block_of[self._hash_of.pop(block)]
            self._refs[block] = 1
            taken.append(block)
        return taken

    def _drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._blank.append(block)
