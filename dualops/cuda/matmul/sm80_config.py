"""The Config of matmul's sm80 rung, and the layout of its shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..tile.warp_mma import STEP_BYTES
from ..tile.warp_rows import COLUMNS, WarpRowsLayout


@dataclass(frozen=True)
class Sm80Config:
    """A block of warps_m x warps_n warps. Each warp computes warp_m x warp_n elements of the result."""

    warps_m: int
    warps_n: int
    warp_m: int
    warp_n: int
    block_k: int  # steps of the sum in a slice
    num_stages: int
    min_blocks: int = 1
    itemsize: int = 2
    piece: int = 0  # slices that tensor cores add up before their sum is added in float32 (`pieces`); 0: all

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
        """Return the number of sums of a thread; twice as many with pieces."""
        return self.warp_m * self.warp_n // 32 * (2 if self.piece else 1)

    @cached_property
    def steps(self) -> int:
        """Return the number of products along a slice."""
        return self.block_k * self.itemsize // STEP_BYTES

    @cached_property
    def shares(self) -> int:
        """Return the number of parts in which a slice is copied: one with each product of a slice, except the last
        two."""
        return max(1, self.steps - 2)

    @cached_property
    def b_at(self) -> int:
        """Return the index at which b's slice begins in a stage, in elements."""
        return self.block_m * self.block_k

    @cached_property
    def stage(self) -> int:
        """Return the elements of a stage: a slice of a and one of b."""
        return (self.block_m + self.block_n) * self.block_k

    @cached_property
    def ahead(self) -> int:
        """Return the number of slices in flight."""
        return self.num_stages - 1

    @cached_property
    def last(self) -> int:
        """Return the index at which the last stage begins."""
        return self.ahead * self.stage

    def shared_bytes(self, dtype: str) -> int:
        """Return the bytes of the ring, or of all warps' sums, which use its memory at the end, whichever is larger."""
        return max(self.itemsize * self.num_stages * self.stage, 4 * self.warps * WarpRowsLayout(self.warp_n).size)

    def columns(self, dtype: str) -> int:
        """Return the number of neighbouring columns that a thread writes."""
        return COLUMNS
