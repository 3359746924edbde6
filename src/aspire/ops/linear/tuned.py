"""Measured configurations by (N, K)."""

from aspire.ops.linear.values import LinearConfig

TUNED: dict[tuple[int, int], LinearConfig] = {}
