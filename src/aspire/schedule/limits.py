"""Which requests are too large ever to run."""

from aspire.request import Request
from aspire.schedule.blocks import BlockPool


def check_size(request: Request, pool: BlockPool, *, max_model_len: int) -> None:
    """ValueError, with the numbers, when the request alone would be too much for the model or the pool."""
    name, num_prompt = request.request_id, request.num_prompt
    if num_prompt < 1:
        raise ValueError(f"prompt of request {name!r} must hold at least 1 token, got 0")
    if request.max_total > max_model_len or request.max_total <= num_prompt:
        raise ValueError(f"request {name!r}: prompt ({num_prompt} tokens) plus at least 1 token of output must be "
                         f"within max_model_len ({max_model_len}), got {request.max_total} in all")
    if pool.blocks_for(request.max_total) > pool.num_blocks:
        capacity = pool.num_blocks * pool.block_size
        raise ValueError(f"request {name!r}: prompt plus max_tokens must fit the KV cache of {capacity} tokens "
                         f"({pool.num_blocks} blocks of {pool.block_size}), got {request.max_total}")
