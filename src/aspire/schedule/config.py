"""What a scheduler must know of the engine around it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """lookahead: tokens beyond the known ones for which a running request holds blocks; at least one whole round
    (draft limit + 1). sparse_emits: the policy never verifies, sparse rows are output (lossy). most_decode_tokens:
    tokens of a step without prefill that the device has a CUDA graph for; a step of more is slow, not refused."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    lookahead: int
    sparse_emits: bool = False
    most_decode_tokens: float = float("inf")

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "lookahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {getattr(self, name)!r}")
