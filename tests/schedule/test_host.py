"""HostPool against rules that a slow model can state: what is kept, what is driven out, and in which order."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aspire.schedule.host import HostPool


def keys(text: str) -> list[bytes]:
    """One key per letter."""
    return [letter.encode() for letter in text]


def kept(pool: HostPool, text: str) -> str:
    pool.check()
    return "".join(letter for letter in text if letter.encode() in pool)


def test_only_what_is_new_is_copied() -> None:
    """Planted fault: keep() placed contents that were there already."""
    pool = HostPool(8)
    assert pool.keep(keys("abc")) == [(0, 0), (1, 1), (2, 2)]
    assert pool.keep(keys("abd")) == [(2, 3)]
    assert pool.block(b"d") == 3
    assert pool.num_used == 4
    assert pool.claim("r", keys("abce")) == [(3, 4)]
    assert kept(pool, "abcde") == "abcde"


def test_loose_contents_go_oldest_first_and_ends_before_beginnings() -> None:
    """Planted fault: keep() left new contents in the order of the prefix, so its beginning went first."""
    pool = HostPool(4)
    pool.keep(keys("abc"))
    pool.keep(keys("x"))
    pool.keep(keys("y"))
    assert kept(pool, "abcxy") == "abxy"
    pool.keep(keys("a"))  # touched again
    pool.keep(keys("zw"))
    assert kept(pool, "abxyzw") == "ayzw"


def test_a_prefix_that_does_not_fit_keeps_its_beginning() -> None:
    """Planted fault: keep() took the first loose content for a victim, its own included: "d" drove "c" out."""
    pool = HostPool(3)
    assert len(pool.keep(keys("abcdef"))) == 3
    assert kept(pool, "abcdef") == "abc"
    assert pool.keep(keys("abcd")) == []
    assert kept(pool, "abcd") == "abc"
    assert len(pool.claim("r", keys("uvwxyz"))) == 3
    assert kept(pool, "abcuvwxyz") == "uvw"


def test_loose_contents_never_cost_a_claim() -> None:
    """Planted fault: keep() fell back on claims as claim() does."""
    pool = HostPool(3)
    pool.claim("r", keys("ab"))
    assert pool.keep(keys("xyz")) == [(0, 2)]
    assert kept(pool, "abxyz") == "abx"
    pool.disclaim("r")
    pool.keep(keys("xyz"))
    assert kept(pool, "abxyz") == "xyz"


def test_who_waits_longest_loses_first_and_keeps_what_is_not_needed() -> None:
    """Planted fault: _cheapest() took the claim made last."""
    pool = HostPool(4)
    pool.claim("old", keys("ab"))
    pool.claim("new", keys("cd"))
    pool.claim("last", keys("x"))
    assert kept(pool, "abcdx") == "acdx"
    assert pool.claimants == ("new", "last")
    pool.disclaim("old")  # has lost it: no effect
    pool.check()


def test_a_content_that_two_wait_for_stays_for_the_second() -> None:
    """Planted fault: disclaim() made contents loose whoever else claims them."""
    pool = HostPool(3)
    pool.claim("one", keys("ab"))
    pool.claim("two", keys("ac"))
    pool.disclaim("one")
    assert pool.keep(keys("xyz")) == [(0, 1)]
    assert kept(pool, "abcx") == "acx"


def test_impossible_sizes_and_double_claims_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be an integer >= 1, got 0"):
        HostPool(0)
    pool = HostPool(2)
    pool.claim("r", keys("a"))
    with pytest.raises(AssertionError, match="claimed already"):
        pool.claim("r", keys("b"))


def test_check_sees_lost_and_doubly_used_blocks() -> None:
    """The check itself: the faults are planted here, in the pool's own state."""
    lost = HostPool(2)
    lost._blank.pop()
    with pytest.raises(AssertionError, match="lost"):
        lost.check()
    double = HostPool(3)
    double.keep(keys("ab"))
    double._block_of[b"a"] = double._block_of[b"b"]
    with pytest.raises(AssertionError, match="two contents"):
        double.check()
    leaked = HostPool(3)
    leaked.claim("r", keys("a"))
    del leaked._claims["r"]
    with pytest.raises(AssertionError, match="counts disagree"):
        leaked.check()


class HostMachine(RuleBasedStateMachine):
    """The model knows which content was copied into which host block last, and who claims what.

    Planted faults it caught: a driven-out key left findable; claims not counted for contents that were there already;
    contents placed again that were there already.
    """

    @initialize(num_blocks=st.integers(1, 8))
    def build(self, num_blocks: int) -> None:
        self.pool = HostPool(num_blocks)
        self.content: dict[int, bytes] = {}
        self.claims: dict[str, list[bytes]] = {}
        self.count = 0

    def copied(self, chain: Sequence[bytes], placed: list[tuple[int, int]]) -> None:
        assert [index for index, _ in placed] == sorted({index for index, _ in placed})
        for index, block in placed:
            self.content[block] = chain[index]

    @rule(chain=st.text("abcdefghij", max_size=6).map(lambda text: keys("".join(dict.fromkeys(text)))))
    def keep(self, chain: list[bytes]) -> None:
        before = [key for keys_ in self.claims.values() for key in keys_ if key in self.pool]
        self.copied(chain, self.pool.keep(chain))
        assert all(key in self.pool for key in before), "a claimed content was driven out"

    @rule(chain=st.text("abcdefghij", max_size=6).map(lambda text: keys("".join(dict.fromkeys(text)))))
    def claim(self, chain: list[bytes]) -> None:
        name = f"r{self.count}"
        self.count += 1
        self.copied(chain, self.pool.claim(name, chain))
        stored = [key in self.pool for key in chain]
        assert all(stored) or self.pool.claimants == (name,), "others keep what the newest claim needs"
        self.claims = {other: self.claims[other] for other in self.pool.claimants if other != name}
        self.claims[name] = [key for key in chain if key in self.pool]

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def disclaim(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.claims)))
        self.pool.disclaim(name)
        del self.claims[name]

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert self.pool.claimants == tuple(self.claims)
        for claimed in self.claims.values():
            assert all(key in self.pool for key in claimed), "a claimed content was driven out"
        for letter in keys("abcdefghij"):
            if letter in self.pool:
                assert self.content[self.pool.block(letter)] == letter, "found where it was not copied to"


HostMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
test_pool_against_model = HostMachine.TestCase
