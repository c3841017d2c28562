"""The tiles of log_decay's gradient on Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...tile.column_sums import column_sums_bytes, warp_sums_bytes
from ...tile.swizzle import Operand
from .config import CHUNK, CONSUMERS, DECAY_TABLES, KEY_WIDTH

WARPS = 4 * CONSUMERS  # that multiply
SUMS, OF_WARPS = column_sums_bytes(CHUNK, WARPS), warp_sums_bytes(WARPS)


class MetTiles(NamedTuple):
    """What lies in shared memory of a walk."""

    x: Operand  # [CHUNK, 128], a stage; K's is the same
    y: Operand  # [CHUNK, Dv], a stage
    v: Operand  # where Y lies, too
    y_at: int
    sums_at: int
    warps_at: int
    decay_at: int  # the tables of log_decay
    nbytes: int


class PairTiles(NamedTuple):
    """What lies in shared memory where pairs of a chunk meet."""

    q: Operand  # [CHUNK, D]; K's is the same
    do: Operand  # [CHUNK, Dv]; V's is the same
    k_at: int
    do_at: int
    v_at: int
    sums_at: int
    warps_at: int
    decay_at: int
    nbytes: int


@dataclass(frozen=True)
class StepsConfig:
    """stages: of X and Y, then K and V, which a walk reads of a chunk in turns: with three, two are on their way while
    it reads one. run: chunks that a block of pairs has one after another, so that it loads one while it sums up the one
    before.
    """

    stages: int = 3
    run: int = 4

    def met_tiles(self, Dv: int) -> MetTiles:
        """For values of this width, in whole boxes."""
        x, y = Operand(CHUNK, KEY_WIDTH, 2, 128, "k"), Operand(CHUNK, Dv, 2, 128, "k")
        v = Operand(CHUNK, Dv, 2, 128, "mn")
        y_at = self.stages * x.nbytes
        sums_at = y_at + self.stages * y.nbytes
        warps_at = sums_at + SUMS
        decay_at = warps_at + OF_WARPS
        return MetTiles(x, y, v, y_at, sums_at, warps_at, decay_at, decay_at + DECAY_TABLES)

    def pair_tiles(self, D: int, Dv: int) -> PairTiles:
        """The same, and for keys of this width."""
        q, do = (Operand(CHUNK, width, 2, 128, "k") for width in (D, Dv))
        k_at = q.nbytes
        do_at = k_at + q.nbytes
        v_at = do_at + do.nbytes
        sums_at = v_at + do.nbytes
        warps_at = sums_at + SUMS
        decay_at = warps_at + OF_WARPS
        return PairTiles(q, do, k_at, do_at, v_at, sums_at, warps_at, decay_at, decay_at + DECAY_TABLES)
