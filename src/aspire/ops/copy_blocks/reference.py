"""copy_blocks: contents of some rows of one store into rows of another (torch, any device)."""

from torch import Tensor

from aspire.ops.copy_blocks.store import BlockStore


def copy_blocks(source: BlockStore, source_rows: Tensor, target: BlockStore, target_rows: Tensor) -> None:
    """Row source_rows[n] of every part of `source` becomes row target_rows[n] of that part of `target`.

    source_rows, target_rows: int64 [N] on the stores' device; target rows are distinct. Both stores have parts of one
    number and size.
    """
    for old, new in zip(source.parts, target.parts, strict=True):
        new[target_rows] = old[source_rows]
