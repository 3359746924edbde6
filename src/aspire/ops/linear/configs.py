"""Chunks and tiles of the batch-invariant linear. Chunks decide bits and depend on (N, K) alone; tiles decide speed."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

GRAIN = 128  # chunks are multiples of every tile's depth

Loads = Literal["pointers", "descriptors"]  # descriptors: by the tensor memory accelerator, on GPUs that have one


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program. spread: chunks go to programs of their own where there are several."""

    weights: int
    tokens: int
    depth: int
    warps: int
    stages: int
    spread: bool = True
    loads: Loads = "pointers"
    group: int = 8


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """splits chunks of `chunk` inputs, the last one shorter; tiles: (largest M, tile), ascending, the last for all."""

    splits: int
    chunk: int
    tiles: tuple[tuple[int, Tile], ...]


DEFAULT_TILES = (
    (16, Tile(64, 16, 128, 4, 5)),
    (32, Tile(64, 32, 128, 4, 5)),
    (64, Tile(64, 64, 128, 4, 4)),
    (128, Tile(128, 128, 64, 8, 4)),
    (256, Tile(128, 128, 64, 8, 4)),
    (1 << 30, Tile(128, 128, 64, 8, 4, spread=False)),
)
EXACT_TILE = Tile(32, 32, 32, 4, 2)  # float32, without the matrix unit


def split_inputs(outputs: int, inputs: int) -> tuple[int, int]:
    """(splits, chunk) for weights [outputs, inputs]: enough programs of 64 outputs to fill a large GPU."""
    wanted = max(1, round(192 / -(-outputs // 64)))
    chunk = -(-inputs // wanted)
    chunk = max(4 * GRAIN, -(-chunk // GRAIN) * GRAIN)
    return -(-inputs // chunk), chunk


def choose_config(outputs: int, inputs: int) -> LinearConfig:
    """The configuration of weights [outputs, inputs], whatever they are multiplied with."""
    return LinearConfig(*split_inputs(outputs, inputs), DEFAULT_TILES)


def fit_tile(tile: Tile, shared_bytes: int, loads: Loads) -> Tile:
    """The tile with as many stages, at least 2, as 16-bit operands leave room for, and loads the device has."""
    stage_bytes = 2 * (tile.weights + tile.tokens) * tile.depth
    return replace(tile, stages=max(2, min(tile.stages, shared_bytes // stage_bytes)),
                   loads="pointers" if loads == "pointers" else tile.loads)


def choose_tile(config: LinearConfig, num_rows: int, dtype: torch.dtype) -> Tile:
    """The tile for M = num_rows."""
    if dtype == torch.float32:
        return EXACT_TILE
    return next(tile for largest, tile in config.tiles if num_rows <= largest)
