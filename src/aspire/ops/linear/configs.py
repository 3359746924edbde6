"""Which chunks and tiles the linear operator uses: measured ones where there are, else by rule."""

from dataclasses import replace

import torch

from aspire.ops.linear.tuned import TUNED
from aspire.ops.linear.values import GRAIN, LinearConfig, Loads, Tile

EXACT_TILE = Tile(32, 32, 32, 4, 2)  # float32, without the matrix unit


def split_inputs(outputs: int, inputs: int) -> tuple[int, int]:
    """(splits, chunk) for weights [outputs, inputs]: two chunks where outputs alone are too few programs, else one."""
    splits = 2 if outputs <= 4096 <= inputs and inputs >= 2 * outputs else 1
    chunk = -(-inputs // (GRAIN * splits)) * GRAIN
    return -(-inputs // chunk), chunk


def choose_config(outputs: int, inputs: int) -> LinearConfig:
    """The configuration of weights [outputs, inputs], whatever they are multiplied with.

    Shapes that were not measured take the tiles of a measured one: split, wide or narrow.
    """
    if (outputs, inputs) in TUNED:
        return TUNED[outputs, inputs]
    splits, chunk = split_inputs(outputs, inputs)
    model = (4096, 14336) if splits > 1 else (28672, 4096) if outputs >= 12288 else (4096, 4096)
    return LinearConfig(splits, chunk, TUNED[model].tiles)


def fit_tile(tile: Tile, shared_bytes: int, loads: Loads) -> Tile:
    """The tile with as many stages as 16-bit operands leave room for, at least 2, and loads the device has."""
    depth = tile.depth
    width_bytes = 2 * (tile.weights + tile.tokens + tile.extra)
    while 2 * depth * width_bytes > shared_bytes:
        depth //= 2
    stages = max(2, min(tile.stages, shared_bytes // (depth * width_bytes)))
    return replace(tile, depth=depth, stages=stages, loads="pointers" if loads == "pointers" else tile.loads)


def choose_tile(config: LinearConfig, num_rows: int, dtype: torch.dtype) -> Tile:
    """The tile for M = num_rows."""
    if dtype == torch.float32:
        return EXACT_TILE
    return next(tile for largest, tile in config.tiles if num_rows <= largest)
