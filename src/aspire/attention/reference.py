"""The torch backend: any device, float32 arithmetic; what the CPU runs and what kernels are tested against."""

from torch import Tensor

from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection
from aspire.ops.paged_attention.reference import paged_attention
from aspire.ops.store_kv.reference import store_kv


class ReferenceAttention:
    """An AttentionBackend without state."""

    name = "reference"
    captures = False

    def store(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
              options: AttentionOptions | None = None) -> None:
        """See ops.store_kv."""
        key_scale, value_scale = (1.0, 1.0) if options is None else (options.key_scale, options.value_scale)
        store_kv(key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: AttentionRows,
               selection: RowSelection | None, options: AttentionOptions,
               probe: Probe | None) -> tuple[Tensor, Tensor | None]:
        """See ops.paged_attention."""
        return paged_attention(query, key_cache, value_cache, rows, selection, options, probe)
