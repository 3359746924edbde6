"""The values of the sampling operator: what each row of logits needs, and what comes back.

Letters: N rows of logits, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

STREAM_TARGET = 0  # the pick of the full model; with shared noise the draft's pick too
STREAM_DRAFT = 1  # rejection sampling only: the draft's pick
STREAM_ACCEPT = 2  # rejection sampling only: the accept test
STREAM_RESIDUAL = 3  # rejection sampling only: the token that replaces a rejected draft


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the rows of a batch ask for. All tensors lie on the device of the logits.

    position: absolute index in the sequence (prompt included) of the token being chosen; at least 0, below 2^32.
    mode: the host's upper bound of what any row needs. "greedy": every temperature is 0 and only the argmax runs;
        "plain": no row filters; "filtered": everything. A row's pick is the same under every mode that covers it.
    stream: which family of noise to draw from, see the constants above.
    """

    temperature: Tensor  # float32 [N]; 0: greedy
    top_k: Tensor  # int32 [N]; <= 0: off
    top_p: Tensor  # float32 [N]; >= 1: off
    min_p: Tensor  # float32 [N]; 0: off
    seed: Tensor  # int64 [N]; all 64 bits count
    position: Tensor  # int64 [N]
    mode: Literal["greedy", "plain", "filtered"] = "filtered"
    stream: int = STREAM_TARGET


@dataclass(frozen=True, slots=True)
class Picks:
    """token: the chosen ids. margin: perturbed best minus second best, in units of the logits: the draft's and the
    target's logits must differ by about that much before the target picks another token. Infinite when only one
    token is allowed, 0 when none is, NaN when some of the row's logits are not numbers (token is 0 then)."""

    token: Tensor  # int64 [N]
    margin: Tensor  # float32 [N]


def seed_bits(seed: int) -> int:
    """Any integer seed as the int64 that SamplingRows holds: its lowest 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
