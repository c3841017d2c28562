"""The Config of matmul's simt rung, and the layout of its shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from ..tile.shared import Shared, Tile

LANES_M, LANES_N = 8, 4  # lanes of a warp along rows and columns of the result


@dataclass(frozen=True)
class SimtConfig:
    """A block of warps_m x warps_n warps. Each thread computes tile_m x tile_n elements of the result."""

    warps_m: int
    warps_n: int
    tile_m: int
    tile_n: int
    block_k: int  # steps of the sum in a slice
    min_blocks: int = 1

    @cached_property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @cached_property
    def block_m(self) -> int:
        return self.warps_m * LANES_M * self.tile_m

    @cached_property
    def block_n(self) -> int:
        return self.warps_n * LANES_N * self.tile_n

    @cached_property
    def coming(self) -> int:
        """Return the numbers of a slice that a thread has in flight."""
        return self.block_k * max(self.block_m, self.block_n) // self.threads

    def shared_bytes(self, dtype: str) -> int:
        return stages(self, dtype).nbytes

    def columns(self, dtype: str) -> int:
        """Return the neighbouring columns of a thread."""
        return min(self.tile_n, 4 if dtype == "float64" else 8)


class Stages(NamedTuple):
    """The layout of shared memory: two stages, each with a slice of a and one of b, then the totals."""

    a: Tile
    b: Tile
    size: int  # numbers from the first stage to the second
    totals: int
    nbytes: int  # bytes in total


@cache
def stages(config: SimtConfig, dtype: str) -> Stages:
    """Return the layout of a kernel's shared memory."""
    shared = Shared(dtype, config.threads)
    a = shared.tile(config.block_k, config.block_m)
    b = shared.tile(config.block_k, config.block_n)
    size = shared.count
    shared.vector(size)  # the second
    totals = shared.vector(config.block_m * config.block_n)
    return Stages(a, b, size, totals, shared.nbytes)
