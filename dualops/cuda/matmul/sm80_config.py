"""The Config of matmul's sm80 rung, and what lies in the shared memory of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..tile.warp_mma import STEP_BYTES
from ..tile.warp_rows import COLUMNS, WarpRowsLayout


@dataclass(frozen=True)
class Sm80Config:
    """A block of warps_m x warps_n warps, which hold warp_m x warp_n of the result each."""

    warps_m: int
    warps_n: int
    warp_m: int
    warp_n: int
    block_k: int  # steps of the sum in a slice
    num_stages: int
    min_blocks: int = 1
    itemsize: int = 2
    piece: int = 0  # slices whose sum the tensor cores make before it is added in float32 (`pieces`); 0: all

    @cached_property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @cached_property
    def threads(self) -> int:
        return 32 * self.warps

    @cached_property
    def block_m(self) -> int:
        return self.warps_m * self.warp_m

    @cached_property
    def block_n(self) -> int:
        return self.warps_n * self.warp_n

    @cached_property
    def sums(self) -> int:
        """Of a thread; twice as many where there are pieces."""
        return self.warp_m * self.warp_n // 32 * (2 if self.piece else 1)

    @cached_property
    def steps(self) -> int:
        """Products along a slice."""
        return self.block_k * self.itemsize // STEP_BYTES

    @cached_property
    def shares(self) -> int:
        """In so many shares a slice is asked for, with the first products of another: the last waits for others."""
        return max(1, self.steps - 2)

    @cached_property
    def b_at(self) -> int:
        """Where b's slice begins in a stage, in elements."""
        return self.block_m * self.block_k

    @cached_property
    def stage(self) -> int:
        """Elements from a stage to the next: a slice of a and one of b."""
        return (self.block_m + self.block_n) * self.block_k

    def shared_bytes(self, dtype: str) -> int:
        """The ring, and in its place at the end the sums of all warps."""
        return max(self.itemsize * self.num_stages * self.stage, 4 * self.warps * WarpRowsLayout(self.warp_n).size)

    def columns(self, dtype: str) -> int:
        """Columns that a thread writes side by side."""
        return COLUMNS
