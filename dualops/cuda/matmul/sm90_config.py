"""The Configs of matmul's sm90 rung: what lies in shared memory, which are there, and which suits a product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..arrays import cdiv
from ..device import Device
from ..tile.boxes import Cluster
from ..tile.warpgroup import ROWS
from .product import Product

SLACK = 1024  # bytes of shared memory that the mbarriers take, and what lies between them and the stages
MOST_TILES = 2**31 - 1
ONE_BLOCK = Cluster()


@dataclass(frozen=True)
class Sm90Config:
    """A block's tile has 64 rows for each of `consumers` warpgroups, and block_n columns."""

    consumers: int
    block_n: int
    stages: int
    store_n: int  # columns of the result that are on their way at once
    cluster: Cluster = ONE_BLOCK
    block_k: int = 64
    group: int = 8  # tiles above one another whose blocks run side by side
    itemsize: int = 2
    piece: int = 0  # slices whose sum the tensor cores make before it is added in float32 (`pieces`); 0: all

    @cached_property
    def block_m(self) -> int:
        return ROWS * self.consumers

    @cached_property
    def stage_bytes(self) -> int:
        return self.itemsize * self.block_k * (self.block_m + self.block_n)

    @cached_property
    def output_at(self) -> int:
        """Where the result's place begins, behind the stages."""
        return self.stages * self.stage_bytes

    @cached_property
    def shared_bytes(self) -> int:
        return self.output_at + self.itemsize * self.block_m * self.store_n

    def tiles(self, product: Product) -> int:
        """Tiles of a product, with those that clusters make beyond its edge."""
        rows, columns = cdiv(product.m.size, self.block_m), cdiv(product.n.size, self.block_n)
        high, wide = self.cluster.rows, self.cluster.columns
        return product.batches * cdiv(rows, high) * high * cdiv(columns, wide) * wide


# Tiles; picoseconds for a step of the sum, and for what comes before and after a sum. H200, 2026-11-22, bfloat16
START = 2_500_000
TILES = (
    (Sm90Config(2, 256, 4, 128), 12_300),  # 4096^3 in clusters of two, whichever way: 1 to 5 % slower
    (Sm90Config(2, 192, 5, 64), 9_600),
    (Sm90Config(2, 128, 6, 128), 7_000),
    (Sm90Config(2, 64, 8, 64), 3_400),
    (Sm90Config(1, 128, 8, 128), 3_300),
    (Sm90Config(1, 64, 10, 64), 2_600),
    (Sm90Config(1, 32, 12, 32), 2_700),  # in clusters of four that share a's tiles: twice as long
)


def _floats(*sizes: Any, block_k: int = 32, **options: Any) -> Sm90Config:
    return Sm90Config(*sizes, block_k=block_k, itemsize=4, **options)


# the same of "tf32", and of "3xtf32", where a step is half a number of the sum: not measured yet
TF32_TILES = (
    (_floats(2, 256, 4, 64), 24_600),
    (_floats(2, 192, 5, 32), 19_200),
    (_floats(2, 128, 6, 64), 14_000),
    (_floats(2, 64, 8, 64), 6_800),
    (_floats(1, 128, 8, 64), 6_600),
    (_floats(1, 64, 10, 64), 5_200),
    (_floats(1, 32, 12, 32), 5_400),
)
SPLIT_TILES = (
    (_floats(2, 128, 3, 64, block_k=64, piece=1), 21_000),
    (_floats(2, 192, 5, 32, piece=2), 28_800),
    (_floats(2, 64, 8, 64, piece=2), 11_500),
    (_floats(1, 128, 6, 64, piece=2), 12_000),
    (_floats(1, 64, 10, 64, piece=2), 8_500),
    (_floats(1, 32, 12, 32, piece=2), 8_500),
)


def configs(product: Product, device: Device, precision: str | None = None) -> Iterator[tuple[Sm90Config, str]]:
    """Tiles for a product, best first: by the time of the busiest SM, whole tiles counted.

    precision: that of float32; None for 16-bit factors.
    """
    found = []
    for config, step in {None: TILES, "tf32": TF32_TILES, "3xtf32": SPLIT_TILES}[precision]:
        tiles = config.tiles(product)
        if tiles <= MOST_TILES and config.shared_bytes + SLACK <= device.shared_memory_per_block:
            time = START + cdiv(tiles, device.sms) * product.rounds * product.k.size * step
            found.append((time, config, f"{config.block_m} x {config.block_n} a block, {tiles} tiles"))
    for _, config, reason in sorted(found, key=lambda each: each[0]):
        yield config, reason
