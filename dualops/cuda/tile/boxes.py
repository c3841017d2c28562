"""Tiles that copies of boxes bring into the stages of a pipeline, where products of a warpgroup read them.

    a = box_tile(Operand(BLOCK_M, BLOCK_K, 2, 128, "k"), at=0, stages=4, others=1)
    a.load(smem, stage, a_map, Corner(m0, k0, (batch,)), barriers.full)

An array's map has the axis that is contiguous first, then the tile's other one, then `others` more. A tile is as many
boxes as its lines are wide in units of its swizzle's span. Blocks of a cluster that share a tile load a part of it
each, and send that to one another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..compiler.backend import Members, Noun, cuda, i32, members, noun, u16, verb
from ..ptx.tma import cp_async_bulk_tensor, prefetch_tensormap
from ..ptx.warp import cluster_ctarank
from .swizzle import Operand


class Corner(NamedTuple):
    """The origin of a tile in an array: along its own rows (of B: columns), along the sum, and along the other axes."""

    row: Any
    depth: Any
    others: tuple[Any, ...]


class Cluster(NamedTuple):
    """Blocks whose tiles of the result are neighbours: `rows` x `columns` of them.

    Blocks of one column share a tile of B. Blocks of one row share a tile of A.
    """

    rows: int = 1
    columns: int = 1

    @property
    def blocks(self) -> int:
        return self.rows * self.columns

    @property
    def of_a(self) -> Sharing:
        """How A's tiles are shared: blocks r, r + rows, ... have the same."""
        return Sharing(self.columns, self.rows, self.blocks, sum(1 << self.rows * c for c in range(self.columns)))

    @property
    def of_b(self) -> Sharing:
        """How B's tiles are shared: blocks c * rows, c * rows + 1, ... have the same."""
        return Sharing(self.rows, 1, self.rows, (1 << self.rows) - 1)


class Sharing(NamedTuple):
    """`blocks` blocks of a cluster load the same tile, a part each. Block r loads part r % whole // step, and sends it
    to the blocks whose bits `mask` has, once it is shifted to the first of them.
    """

    blocks: int = 1
    step: int = 1  # from the number of one of them to the next
    whole: int = 1  # a multiple of which lies between blocks of equal parts
    mask: int = 1


ALONE = Sharing()


BoxTile = Noun  # what `box_tile` makes


@verb
def prefetch_maps(maps, warp):
    """Prefetch a tuple of maps; called by all threads. Each warp from number `warp` on prefetches one map. The block
    must have that many warps.
    """
    for number in range(len(maps)):
        if cuda.threadIdx.x == 32 * (warp + number):
            prefetch_tensormap(maps[number])


def box_shape(tile: Operand, sharing: Sharing = ALONE) -> tuple[int, int]:
    """Lines and elements of a line of one box of a tile that is shared so."""
    return tile.lines // sharing.blocks, tile.span // tile.itemsize


@noun
def box_tile(tile: Operand, at: int, others: int, sharing: Sharing = ALONE, *, room: int = 0) -> Members:
    """A tile in every stage of a pipeline, loaded as boxes.

    The verbs of a tile whose first stage begins at byte `at`; others: axes of its array in addition to its own two;
    room: bytes of a stage, if it is larger than the tile.

    Each of the blocks that share it loads an equal part of the lines. Raises ValueError where that is no whole pattern
    of 8.
    """
    lines, along = box_shape(tile, sharing)
    if tile.lines % (8 * sharing.blocks):
        multiple = f"a multiple of {8 * sharing.blocks} for {sharing.blocks} blocks"
        raise ValueError(f"a tile of {tile.lines} lines, expected {multiple}")
    shared = sharing.blocks > 1
    start, k_major = _start(others, shared), tile.major == "k"
    boxes, box_bytes, part_bytes, stage_bytes = tile.width // along, tile.box, lines * tile.span, room or tile.nbytes

    @verb
    def at_(stage):
        """Return the byte of shared memory where the tile begins in a stage."""
        return at + stage * stage_bytes

    @verb
    def load(smem, stage, tensor_map, corner, full):
        """Start to load the tile into a stage; by one thread."""
        line, first = (corner.row, corner.depth) if k_major else (corner.depth, corner.row)
        to, blocks = at_(stage), 0
        if shared:
            rank = cluster_ctarank()
            part = rank % sharing.whole // sharing.step
            line, to = line + part * lines, to + part * part_bytes
            blocks = sharing.mask << rank - part * sharing.step
        for box in range(boxes):
            place, column = i32(to + box * box_bytes), i32(first + box * along)
            start(smem, place, tensor_map, column, i32(line), corner.others, full, stage, blocks)

    return members(
        locals(),
        nbytes=tile.nbytes,  # of one
    )


def _start(others: int, shared: bool) -> Callable[..., None]:
    """(smem, to, tensor_map, c0, c1, others, full, stage, blocks): start to load a box; shared: into several blocks."""
    copy = cp_async_bulk_tensor(2 + others, shared)

    @verb
    def one(smem, to, tensor_map, c0, c1, others, full, stage, blocks):
        if shared:
            copy(smem, to, tensor_map, c0, c1, others[0], full, stage, u16(blocks))
        else:
            copy(smem, to, tensor_map, c0, c1, others[0], full, stage)

    @verb
    def two(smem, to, tensor_map, c0, c1, others, full, stage, blocks):
        if shared:
            copy(smem, to, tensor_map, c0, c1, others[0], others[1], full, stage, u16(blocks))
        else:
            copy(smem, to, tensor_map, c0, c1, others[0], others[1], full, stage)

    @verb
    def three(smem, to, tensor_map, c0, c1, others, full, stage, blocks):
        if shared:
            copy(smem, to, tensor_map, c0, c1, others[0], others[1], others[2], full, stage, u16(blocks))
        else:
            copy(smem, to, tensor_map, c0, c1, others[0], others[1], others[2], full, stage)

    return {1: one, 2: two, 3: three}[others]
