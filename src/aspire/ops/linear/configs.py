"""Which chunks and tiles the linear operator uses: measured ones where there are, else by rule."""

from dataclasses import replace

import torch

from aspire.ops.linear.tuned import TUNED
from aspire.ops.linear.values import GRAIN, LinearConfig, Loads, Tile

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
    """(splits, chunk) for weights [outputs, inputs]: two chunks where outputs alone are too few programs, else one."""
    splits = 2 if outputs <= 4096 and inputs >= 2 * outputs else 1
    chunk = -(-inputs // (GRAIN * splits)) * GRAIN
    return -(-inputs // chunk), chunk


def choose_config(outputs: int, inputs: int) -> LinearConfig:
    """The configuration of weights [outputs, inputs], whatever they are multiplied with."""
    return TUNED.get((outputs, inputs)) or LinearConfig(*split_inputs(outputs, inputs), DEFAULT_TILES)


def fit_tile(tile: Tile, shared_bytes: int, loads: Loads) -> Tile:
    """The tile with as many stages, at least 2, as 16-bit operands leave room for, and loads the device has."""
    stage_bytes = 2 * (tile.weights + tile.tokens + tile.extra) * tile.depth
    return replace(tile, stages=max(2, min(tile.stages, shared_bytes // stage_bytes)),
                   loads="pointers" if loads == "pointers" else tile.loads)


def choose_tile(config: LinearConfig, num_rows: int, dtype: torch.dtype) -> Tile:
    """The tile for M = num_rows."""
    if dtype == torch.float32:
        return EXACT_TILE
    return next(tile for largest, tile in config.tiles if num_rows <= largest)
