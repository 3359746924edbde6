"""The CUDA backend: the project's Triton kernels; also runs under Triton's interpreter on the CPU."""

from torch import Tensor

from aspire.attention.rows import AttentionOptions, AttentionRows, Probe, RowSelection
from aspire.ops.paged_attention.triton import KernelConfig, PagedAttention
from aspire.ops.store_kv.triton import store_kv


class TritonAttention:
    """An AttentionBackend that plans each view of a step once, on the device, and launches once per layer."""

    name = "triton"
    captures = True

    def __init__(self, config: KernelConfig | None = None) -> None:
        self._config = config
        self._by_view: dict[int, PagedAttention] = {}

    def store(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
              options: AttentionOptions | None = None) -> None:
        """See ops.store_kv."""
        key_scale, value_scale = (1.0, 1.0) if options is None else (options.key_scale, options.value_scale)
        store_kv(key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: AttentionRows,
               selection: RowSelection | None, options: AttentionOptions,
               probe: Probe | None) -> tuple[Tensor, Tensor | None]:
        """See ops.paged_attention."""
        if rows.view not in self._by_view:
            self._by_view[rows.view] = PagedAttention(self._config)
        return self._by_view[rows.view](query, key_cache, value_cache, rows, selection, options, probe)
