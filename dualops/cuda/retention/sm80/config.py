"""The tiles of retention's sm80 rung, and the shared memory of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...tile.warp_mma import LINE_BYTES, FactorSlice
from ...tile.warp_rows import WarpRowsLayout
from ..arguments import LONGEST_CHUNK

BOX = LINE_BYTES // 2  # elements of 16 bits in a line of a box
ROWS = 16  # of a warp
STAGES = 2
SLICE = 32  # rows of a state in shared memory at a time
WIDEST = 128  # columns of a result that a block has
ITEMSIZE, FLOAT_SIZE = 2, 4


def boxes_of(width: int) -> int:
    """Return the number of boxes for rows of this width. Zeros fill the last box."""
    return -(-width // BOX)


def columns_of(Dv: int) -> int:
    """Return a block's columns of a result, in whole boxes. Several blocks split wide rows."""
    return min(BOX * boxes_of(Dv), WIDEST)


class Shape(NamedTuple):
    """What kernels are built for, in addition to their tiles and variant."""

    boxes: int  # of a row of Q or K, D
    columns: int  # of a block's result
    vector: int  # elements of a copy
    states: bool  # whether rows of states are whole 16-byte vectors
    whole: bool  # whether rows of results are whole 16-byte vectors


class RowsTiles(NamedTuple):
    """Boxes in shared memory, and where they begin, in elements of 16 bits. Stages hold K and V, or part of a state."""

    q: FactorSlice  # [BLOCK_Q, 64]
    k: FactorSlice  # [BLOCK_KV, 64]
    v: FactorSlice  # [BLOCK_KV, 64], lines along columns
    v_boxes: int
    first: int  # stage
    v_at: int  # in a stage
    stage: int  # from one to the next
    nbytes: int


@dataclass(frozen=True)
class Sm80Rows:
    """A block has 16 rows for each of its warps, and block_kv columns of scores at a time."""

    warps: int = 4
    block_kv: int = 64
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def block_q(self) -> int:
        return ROWS * self.warps

    def tiles(self, shape: Shape) -> RowsTiles:
        q, k = (FactorSlice("depth", rows, BOX) for rows in (self.block_q, self.block_kv))
        v, v_boxes = FactorSlice("row", BOX, self.block_kv), shape.columns // BOX
        first, v_at = shape.boxes * q.size, shape.boxes * k.size
        stage = max(v_at + v_boxes * v.size, FLOAT_SIZE // ITEMSIZE * SLICE * shape.columns)
        stored = FLOAT_SIZE * self.warps * WarpRowsLayout(shape.columns).size
        nbytes = max(ITEMSIZE * (first + STAGES * stage), stored)
        return RowsTiles(q, k, v, v_boxes, first, v_at, stage, nbytes)

    def shared_bytes(self, shape: Shape) -> int:
        return self.tiles(shape).nbytes


class StatesTiles(NamedTuple):
    """Boxes in shared memory, and where they begin, in elements of 16 bits."""

    k: FactorSlice  # [TOKENS, 64], lines along rows of the state
    v: FactorSlice  # [TOKENS, 64], lines along its columns
    v_boxes: int
    v_at: int  # in a stage
    stage: int  # from one to the next
    weights_at: int  # of the tokens of a chunk, in float32
    nbytes: int


@dataclass(frozen=True)
class Sm80States:
    """A block has 64 rows of a state, 16 a warp, and up to 128 of its columns; `tokens` at a time.

    exact: a decayed key keeps all digits of float32, or nearly all. This is for states that are results. Otherwise the
    key is rounded, as rows round the state when they read it.
    """

    exact: bool = False
    tokens: int = 64
    min_blocks: int = 2
    warps: int = BOX // ROWS

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def tiles(self, columns: int) -> StatesTiles:
        """Return the tiles of a block with this number of columns."""
        k, v = (FactorSlice("row", BOX, self.tokens) for _ in range(2))
        v_boxes = columns // BOX
        stage = k.size + v_boxes * v.size
        weights_at = ITEMSIZE * STAGES * stage // FLOAT_SIZE
        stored = FLOAT_SIZE * self.warps * WarpRowsLayout(columns).size
        nbytes = max(FLOAT_SIZE * (weights_at + LONGEST_CHUNK), stored)
        return StatesTiles(k, v, v_boxes, k.size, stage, weights_at, nbytes)

    def shared_bytes(self, columns: int) -> int:
        return self.tiles(columns).nbytes


class Sm80Config(NamedTuple):
    """Tokens of a chunk, and the tiles of both kernels."""

    chunk: int
    rows: Sm80Rows
    states: Sm80States
