"""The tiles of retention's sm90 rung."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS

SLACK = 1024  # bytes of shared memory that the mbarriers take, and what lies between them and the tiles
BOX = 64  # elements of 16 bits that a line of a box has
CONSUMERS = 2  # warpgroups that multiply
CHUNK = ROWS * CONSUMERS  # tokens
KEY_WIDTH = ROWS * CONSUMERS  # rows of the state: 64 of each warpgroup; what is beyond D is loaded as zeros


class Tiles(NamedTuple):
    """What lies in shared memory."""

    q: Operand  # [CHUNK, 128]
    k: Operand  # [CHUNK, 128], a stage
    v: Operand  # [CHUNK, Dv], a stage
    state: Operand  # [128, Dv]
    k_at: int
    v_at: int
    state_at: int
    o_at: int  # [CHUNK, Dv]
    nbytes: int


@dataclass(frozen=True)
class Sm90Config:
    """stages: of K and V. parts: numbers of 16 bits that a key, once it has decayed, goes to the state as: one where
    the state is read by o alone, which is rounded as coarsely; three, all digits of float32, where it is a result.
    segments: parts of a sequence that blocks walk side by side, where sequences are few.
    """

    stages: int = 2
    parts: int = 1
    segments: int = 1

    def tiles(self, Dv: int) -> Tiles:
        """For values of this width, in whole boxes."""
        q, k = (Operand(CHUNK, KEY_WIDTH, 2, 128, "k") for _ in range(2))
        v, state = (Operand(lines, Dv, 2, 128, "mn") for lines in (CHUNK, KEY_WIDTH))
        k_at = q.nbytes
        v_at = k_at + self.stages * k.nbytes
        state_at = v_at + self.stages * v.nbytes
        o_at = state_at + state.nbytes
        return Tiles(q, k, v, state, k_at, v_at, state_at, o_at, o_at + 2 * CHUNK * Dv)

    def shared_bytes(self, Dv: int) -> int:
        return self.tiles(Dv).nbytes


@dataclass(frozen=True)
class Walk:
    """What a kernel is built for: whether it begins with a state, whether the last one is a result; back: from the last
    chunk to the first; beside: while other launches of its gradient run; looks: else there is no q, and nothing but
    states is made.
    """

    begins: bool = False
    finishes: bool = False
    back: bool = False
    beside: bool = False
    looks: bool = True


def padded(width: int) -> int:
    """A width in whole boxes."""
    return -(-width // BOX) * BOX
