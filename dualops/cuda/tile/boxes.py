"""Tiles that copies of boxes bring into the stages of a pipeline, where products of a warpgroup read them.

    a = box_tile(Operand(BLOCK_M, BLOCK_K, 2, 128, "k"), at=0, stages=4, others=1)
    a.load(smem, stage, a_map, Corner(m0, k0, (batch,)), barriers.full)

An array's map has the axis that is contiguous first, then the tile's other one, then `others` more. A tile is as many
boxes as its lines are wide in units of its swizzle's span. In a cluster that shares a tile, each block loads a part of
it and sends that to all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..backend import Namespace, i32, u16, verb
from ..ptx.fences import fence_proxy_tensormap
from ..ptx.tma import cp_async_bulk_tensor
from ..ptx.warp import cluster_ctarank
from .swizzle import Operand


class Corner(NamedTuple):
    """Where in an array a tile begins: along its own rows (of B: columns), along the sum, and along the other axes."""

    row: Any
    depth: Any
    others: tuple[Any, ...]


class BoxTile(Namespace):
    """A tile in every stage."""

    nbytes: int  # of one
    at: Callable[..., Any]  # (stage) -> byte of shared memory where it begins
    load: Callable[..., None]  # (smem, stage, tensor_map, corner, full): by one thread


@verb
def begin_map(tensor_map):
    """Before this block's first use of a map; by the thread that uses it."""
    fence_proxy_tensormap(tensor_map)


def box_shape(tile: Operand, cluster: int = 1) -> tuple[int, int]:
    """Lines and elements of a line of one box of it, where so many blocks share it."""
    return tile.lines // cluster, tile.span // tile.itemsize


def box_tile(tile: Operand, at: int, others: int, cluster: int = 1) -> BoxTile:
    """The verbs of a tile whose first stage begins at byte `at`; others: axes of its array beside its own two.

    Each block of a cluster loads an equal part of the lines. Raises ValueError where that is no whole pattern of 8.
    """
    lines, along = box_shape(tile, cluster)
    if tile.lines % (8 * cluster):
        raise ValueError(f"a tile of {tile.lines} lines, expected a multiple of {8 * cluster} for {cluster} blocks")
    start, k_major, everyone = _start(others, cluster > 1), tile.major == "k", (1 << cluster) - 1
    boxes, stage_bytes, box_bytes, part_bytes = tile.width // along, tile.nbytes, tile.box, lines * tile.span

    @verb
    def begin(stage):
        return at + stage * stage_bytes

    @verb
    def load(smem, stage, tensor_map, corner, full):
        line, first = (corner.row, corner.depth) if k_major else (corner.depth, corner.row)
        to = begin(stage)
        if cluster > 1:
            rank = cluster_ctarank()
            line, to = line + rank * lines, to + rank * part_bytes
        for box in range(boxes):
            place, column = i32(to + box * box_bytes), i32(first + box * along)
            start(smem, place, tensor_map, column, i32(line), corner.others, full, stage, everyone)

    return BoxTile(nbytes=stage_bytes, at=begin, load=load)


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
    def three(smem, to, tensor_map, c0, c1, others, full, stage, blocks):
        if shared:
            copy(smem, to, tensor_map, c0, c1, others[0], others[1], others[2], full, stage, u16(blocks))
        else:
            copy(smem, to, tensor_map, c0, c1, others[0], others[1], others[2], full, stage)

    return {1: one, 3: three}[others]
