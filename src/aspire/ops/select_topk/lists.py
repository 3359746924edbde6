"""The values that say where selections are kept."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Keep beside each listed unit where it lies in the paged cache: place = block_table[slot, u // per_block] *
    per_block + u % per_block."""

    stored: Tensor  # int32 [L, S, C], beside the units
    block_table: Tensor  # int32 [S, B]
    per_block: int  # units of a cache block


@dataclass(frozen=True, slots=True)
class ListRows:
    """Stored lists of every slot, and which of them each row of scores sets.

    N rows have a slot each; scores may have several blocks of these N rows, and block b sets lists moved on by b.
    verify, draft: lists as (first, count), set by the first `num_verify` of the N rows and by those after; count 0:
    none. Two rows may have one slot only if nobody reads it.
    """

    units: Tensor  # int32 [L, S, C]
    num_units: Tensor  # int32 [L, S]
    slot: Tensor  # int64 [N]
    num_verify: int
    verify: tuple[int, int]
    draft: tuple[int, int]
    places: Places | None = None
