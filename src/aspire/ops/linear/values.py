"""Values of the linear operator: chunks decide bits and depend on (N, K) alone; tiles decide speed."""

from dataclasses import dataclass
from typing import Literal

GRAIN = 128  # chunks are multiples of every tile's depth

Loads = Literal["pointers", "descriptors"]  # descriptors: by the tensor memory accelerator, on GPUs that have one


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program: `weights` outputs of tokens + extra rows, in steps of `depth` inputs.

    spread: chunks go to programs of their own where there are several. group: token tiles that run together.
    """

    weights: int
    tokens: int
    depth: int
    warps: int
    stages: int
    spread: bool = True
    loads: Loads = "pointers"
    extra: int = 0
    group: int = 8


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """splits chunks of `chunk` inputs, the last one shorter; tiles: (largest M, tile), ascending, the last for all."""

    splits: int
    chunk: int
    tiles: tuple[tuple[int, Tile], ...]
