"""The value that says where selections are kept."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ListRows:
    """Stored lists of every slot, and which of them each of N rows sets.

    verify, draft: lists as (first, count), set by the first `num_verify` rows and by the rows after; count 0: none.
    Two rows may have one slot only if nobody reads it.
    """

    units: Tensor  # int32 [L, S, C]
    num_units: Tensor  # int32 [L, S]
    slot: Tensor  # int64 [N]
    num_verify: int
    verify: tuple[int, int]
    draft: tuple[int, int]
