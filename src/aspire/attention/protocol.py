"""AttentionBackend: what the layers need from attention.

Implementations: reference.py (torch), triton.py (the project's kernels), and two that give some rows to a library and
the others to one of these: chunked.py (long prompt chunks, to torch's own kernels), flashinfer.py.
"""

from typing import Protocol

from torch import Tensor

from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection


class AttentionBackend(Protocol):
    """Writes new keys and values, then attends, for all rows of a mixed step at once."""

    @property
    def name(self) -> str: ...

    @property
    def captures(self) -> bool:
        """Whether a step can be captured in a CUDA graph: nothing asks the device."""
        ...

    def store(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
              options: AttentionOptions | None = None) -> None:
        """See ops.store_kv. options: gives the scales of an 8-bit cache; None: scales of 1."""
        ...

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: AttentionRows,
               selection: RowSelection | None, options: AttentionOptions,
               probe: Probe | None) -> tuple[Tensor, Tensor | None]:
        """See ops.paged_attention. `rows` is a fresh object in every step, the same one for all layers of a view."""
        ...
