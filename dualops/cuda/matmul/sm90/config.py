"""The Configs of matmul's sm90 rung: their layout of shared memory, the list of them, and the choice for a product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...launch.arrays import cdiv
from ...launch.device import Device
from ...tile.boxes import Cluster
from ...tile.epilogue import output_box
from ...tile.warpgroup import ROWS
from ..product import Product

SLACK = 1024  # bytes of shared memory for the mbarriers and the padding before the stages
MOST_TILES = 2**31 - 1
ONE_BLOCK = Cluster()


@dataclass(frozen=True)
class Sm90Config:
    """A block's tile has 64 rows for each of `consumers` warpgroups, and block_n columns.

    The blocks of a cluster compute neighbouring tiles, or they split a tile's sum.
    """

    consumers: int
    block_n: int
    stages: int
    store_n: int  # columns of the result that are stored at once
    cluster: Cluster = ONE_BLOCK
    block_k: int = 64
    group: int = 8  # rows of tiles that blocks compute at the same time
    splits: int = 1  # blocks that share a tile's sum
    itemsize: int = 2  # bytes per number of the factors, and of the results
    piece: int = 0  # slices that tensor cores sum before the sum is added to a float32 one (`pieces`); 0: all

    @cached_property
    def block_m(self) -> int:
        return ROWS * self.consumers

    @cached_property
    def stage_bytes(self) -> int:
        return self.itemsize * self.block_k * (self.block_m + self.block_n)

    @cached_property
    def output_at(self) -> int:
        """Byte where the buffers of the result begin, after the stages."""
        return self.stages * self.stage_bytes

    @cached_property
    def places(self) -> int:
        """Number of boxes of a warpgroup's result that are stored at once."""
        return self.store_n // output_box(self.block_n, self.itemsize)[1]

    @cached_property
    def bias_at(self) -> int:
        """Byte where the bias begins, a row of floats for each warpgroup."""
        return self.output_at + self.itemsize * self.block_m * self.store_n

    @cached_property
    def shared_bytes(self) -> int:
        if self.splits > 1:
            return self.output_at + 4 * self.block_m * self.block_n
        return self.bias_at + 4 * self.consumers * self.block_n

    def tiles(self, product: Product) -> int:
        """Return the number of a product's tiles, including those of clusters beyond its edge."""
        rows, columns = cdiv(product.m.size, self.block_m), cdiv(product.n.size, self.block_n)
        high, wide = self.cluster.rows, self.cluster.columns
        return product.batches * cdiv(rows, high) * high * cdiv(columns, wide) * wide


# Tiles; picoseconds for a step of the sum. H200, 2026-11-22, bfloat16, a tile on every SM
TILES = (
    (Sm90Config(2, 256, 4, 128), 10_300),  # 4096^3 in clusters of two in either direction: 1 to 4 % slower
    (Sm90Config(2, 192, 5, 64), 8_200),
    (Sm90Config(2, 128, 6, 128), 5_900),
    (Sm90Config(2, 64, 8, 64), 3_500),
    (Sm90Config(1, 128, 8, 128), 3_500),
    (Sm90Config(1, 64, 10, 64), 2_400),
    (Sm90Config(1, 32, 12, 32), 1_900),  # in clusters of four that share a's tiles: twice as long
    (Sm90Config(1, 128, 8, 128, splits=2), 3_500),
    (Sm90Config(1, 64, 10, 64, splits=2), 2_400),
    (Sm90Config(1, 64, 10, 64, splits=4), 2_400),
)


def _floats(*sizes: Any, block_k: int = 32, **options: Any) -> Sm90Config:
    return Sm90Config(*sizes, block_k=block_k, itemsize=4, **options)


# Tiles and estimated times for "tf32", and for "3xtf32", where a step is half a number of the sum. Measured at 4096^3,
# H200. tf32, b by rows, with its copy: 375 to 383 us, in clusters of two 391. 3xtf32, b by columns: 1069 us; in pieces
# of two and four slices 1097 and 1090; without pieces, in tiles of 128 x 256, 1094 and 119 times the error
TF32_TILES = (
    (_floats(2, 256, 4, 64), 20_600),
    (_floats(2, 192, 5, 32), 16_400),
    (_floats(2, 128, 6, 64), 11_800),
    (_floats(2, 64, 8, 64), 7_000),
    (_floats(1, 128, 8, 64), 7_000),
    (_floats(1, 64, 10, 64), 4_800),
    (_floats(1, 32, 12, 32), 3_800),
    (_floats(1, 128, 8, 64, splits=2), 7_000),
    (_floats(1, 64, 10, 64, splits=4), 4_800),
)
PARTS_TILES = (
    (_floats(2, 128, 3, 64, block_k=64, piece=1), 18_000),
    (_floats(2, 192, 5, 32, piece=2), 25_000),
    (_floats(2, 64, 8, 64, piece=2), 11_000),
    (_floats(1, 128, 6, 64, piece=2), 11_500),
    (_floats(1, 64, 10, 64, piece=2), 8_000),
    (_floats(1, 32, 12, 32, piece=2), 7_000),
    (_floats(1, 128, 6, 64, piece=2, splits=2), 11_500),
    (_floats(1, 64, 10, 64, piece=2, splits=4), 8_000),
)
# picoseconds
START, TILE = 2_600_000, 1_000_000  # per launch, and per tile before and after its sum
MEET = 500_000  # for the barriers between blocks that share a sum
LEAST_SPLIT = 256  # least steps of a sum per block


def _clusters_at_once(device: Device, blocks: int) -> int:
    """Return how many clusters of `blocks` blocks run at the same time.

    A cluster runs within one group of SMs (a GPC), so each group may leave SMs idle.
    """
    return max(1, device.sms // blocks - (device.sms // 32 if blocks > 2 else 0))


def configs(product: Product, device: Device, precision: str | None = None) -> Iterator[tuple[Sm90Config, str]]:
    """Yield tiles for a product, best first: by the time of the busiest SM, in whole tiles.

    precision: that of float32; None for 16-bit factors.
    """
    found = []
    for config, step in {None: TILES, "tf32": TF32_TILES, "3xtf32": PARTS_TILES}[precision]:
        tiles, size = config.tiles(product), f"{config.block_m} x {config.block_n} a block"
        if tiles > MOST_TILES or config.shared_bytes + SLACK > device.shared_memory_per_block:
            continue
        depth = product.rounds * product.k.size // config.splits
        if config.splits == 1:
            time = START + cdiv(tiles, device.sms) * (TILE + depth * step)
            found.append((time, config, f"{size}, {tiles} tiles"))
        elif product.rounds == 1 and depth >= LEAST_SPLIT:
            at_once = _clusters_at_once(device, config.splits)
            time = START + cdiv(tiles, at_once) * (TILE + MEET + depth * step)
            found.append((time, config, f"{size}, {tiles} tiles, {config.splits} blocks add up each"))
    for _, config, reason in sorted(found, key=lambda each: each[0]):
        yield config, reason
