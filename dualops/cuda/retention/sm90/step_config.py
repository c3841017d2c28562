"""The tiles of log_decay's gradient on Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...tile.swizzle import Operand
from ..column_sums import column_sums_bytes, warp_sums_bytes
from .config import BOX, CHUNK, CONSUMERS, DECAY_TABLES, KEY_WIDTH

WARPS = 4 * CONSUMERS  # that multiply
SUMS, OF_WARPS = column_sums_bytes(CHUNK, WARPS), warp_sums_bytes(WARPS)


class MetTiles(NamedTuple):
    """What is in shared memory of a walk."""

    q: Operand  # [CHUNK, 128]
    k: Operand  # [CHUNK, 128], a stage
    v: Operand  # [CHUNK, width]
    y: Operand  # [CHUNK, width]
    state: Operand  # [128, width]
    k_at: int
    v_at: int
    y_at: int
    state_at: int
    o_at: int  # [CHUNK, 64]
    sums_at: int
    warps_at: int
    decay_at: int  # the tables of log_decay
    nbytes: int


class PairTiles(NamedTuple):
    """What is in shared memory of the kernel for the pairs of a chunk."""

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
    """stages: of K, which a walk reads last in a chunk. With two or more, a stage is free when Y of the chunk before is
    released. run: chunks of a block of pairs, one after another, so that it loads one while it sums up the one before.
    """

    stages: int = 2
    run: int = 4

    def met_tiles(self, width: int) -> MetTiles:
        """Return the tiles for V, Y and results of this width, in whole boxes."""
        q, k = (Operand(CHUNK, KEY_WIDTH, 2, 128, "k") for _ in range(2))
        v, state = (Operand(lines, width, 2, 128, "mn") for lines in (CHUNK, KEY_WIDTH))
        y = Operand(CHUNK, width, 2, 128, "k")
        k_at = q.nbytes
        v_at = k_at + self.stages * k.nbytes
        y_at = v_at + v.nbytes
        state_at = y_at + y.nbytes
        o_at = state_at + state.nbytes
        sums_at = o_at + 2 * CHUNK * BOX
        warps_at = sums_at + SUMS
        decay_at = warps_at + OF_WARPS
        return MetTiles(
            q, k, v, y, state, k_at, v_at, y_at, state_at, o_at, sums_at, warps_at, decay_at, decay_at + DECAY_TABLES
        )

    def pair_tiles(self, D: int, Dv: int) -> PairTiles:
        """Return the tiles for keys and values of these widths."""
        q, do = (Operand(CHUNK, width, 2, 128, "k") for width in (D, Dv))
        k_at = q.nbytes
        do_at = k_at + q.nbytes
        v_at = do_at + do.nbytes
        sums_at = v_at + do.nbytes
        warps_at = sums_at + SUMS
        decay_at = warps_at + OF_WARPS
        return PairTiles(q, do, k_at, do_at, v_at, sums_at, warps_at, decay_at, decay_at + DECAY_TABLES)
