"""Tiles in the stages of a pipeline: TMA loads them as boxes, and a warpgroup's products read them.

    a = box_tile(Operand(BLOCK_M, BLOCK_K, 2, 128, "k"), at=0, stages=4, others=1)
    a.load(smem, stage, a_map, Corner(m0, k0, (batch,)), barriers.full)

An array's map has the contiguous axis first, then the tile's other axis, then `others` more. Each line of a tile is
split into boxes that are as wide as the swizzle's span. If blocks of a cluster share a tile, each loads a part of it
and sends the part to the other blocks (multicast).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, i32, members, noun, u16, verb
from ..ptx.tma import cp_async_bulk_tensor, prefetch_tensormap
from ..ptx.warp import cluster_ctarank
from .swizzle import Operand


class Corner(NamedTuple):
    """The origin of a tile in an array: along its rows (for B: columns), along the sum, and along the other axes."""

    row: Any
    depth: Any
    others: tuple[Any, ...]


class Cluster(NamedTuple):
    """A cluster of `rows` x `columns` blocks, whose tiles of the result are neighbours.

    Blocks of one column share a tile of B. Blocks of one row share a tile of A.
    """

    rows: int = 1
    columns: int = 1

    @property
    def blocks(self) -> int:
        return self.rows * self.columns

    @property
    def of_a(self) -> Sharing:
        """The sharing of A's tiles: blocks r, r + rows, ... have the same tile."""
        return Sharing(self.columns, self.rows, self.blocks, sum(1 << self.rows * c for c in range(self.columns)))

    @property
    def of_b(self) -> Sharing:
        """The sharing of B's tiles: blocks c * rows, c * rows + 1, ... have the same tile."""
        return Sharing(self.rows, 1, self.rows, (1 << self.rows) - 1)


class Sharing(NamedTuple):
    """`blocks` blocks of a cluster load the same tile, one part each.

    Block r loads part r % whole // step, and sends it to the blocks in `mask`, shifted by the first of these blocks.
    """

    blocks: int = 1
    step: int = 1  # distance between the numbers of these blocks
    whole: int = 1  # blocks with the same part are a multiple of this apart
    mask: int = 1


ALONE = Sharing()


@verb
def prefetch_maps(maps, warp):
    """Prefetch a tuple of maps; called by all threads.

    Each warp from number `warp` on prefetches one map. The block must have enough warps.
    """
    for number in range(len(maps)):
        if cuda.threadIdx.x == 32 * (warp + number):
            prefetch_tensormap(maps[number])


def box_shape(tile: Operand, sharing: Sharing = ALONE) -> tuple[int, int]:
    """Return the lines, and the elements of a line, of one box of a tile with this sharing."""
    return tile.lines // sharing.blocks, tile.span // tile.itemsize


@noun
def box_tile(tile: Operand, at: int, others: int, sharing: Sharing = ALONE, *, room: int = 0) -> Members:
    """The verbs of a tile that is loaded as boxes into every stage of a pipeline.

    at: byte of the first stage; others: axes of the array in addition to the tile's two; room: bytes of a stage, if it
    is larger than the tile. Each of the blocks that share the tile loads an equal part of its lines. Raises ValueError
    if such a part is not a multiple of 8 lines.
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
        """Return the byte of shared memory at which the tile of a stage begins."""
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
            start(smem, place, tensor_map, Corner(i32(line), column, corner.others), full, stage, blocks)

    return members(
        locals(),
        nbytes=tile.nbytes,  # of one tile
    )


def _start(others: int, shared: bool) -> Callable[..., None]:
    """Return the verb (smem, to, tensor_map, corner, full, stage, blocks), which starts to load a box.

    corner: its first line, as `row`, and column, as `depth`. shared: the box goes to several blocks.
    """
    copy = cp_async_bulk_tensor(2 + others, shared)

    @verb
    def one(smem, to, tensor_map, corner, full, stage, blocks):
        (a,) = corner.others
        if shared:
            copy(smem, to, tensor_map, corner.depth, corner.row, a, full, stage, u16(blocks))
        else:
            copy(smem, to, tensor_map, corner.depth, corner.row, a, full, stage)

    @verb
    def two(smem, to, tensor_map, corner, full, stage, blocks):
        a, b = corner.others
        if shared:
            copy(smem, to, tensor_map, corner.depth, corner.row, a, b, full, stage, u16(blocks))
        else:
            copy(smem, to, tensor_map, corner.depth, corner.row, a, b, full, stage)

    @verb
    def three(smem, to, tensor_map, corner, full, stage, blocks):
        a, b, c = corner.others
        if shared:
            copy(smem, to, tensor_map, corner.depth, corner.row, a, b, c, full, stage, u16(blocks))
        else:
            copy(smem, to, tensor_map, corner.depth, corner.row, a, b, c, full, stage)

    return {1: one, 2: two, 3: three}[others]
