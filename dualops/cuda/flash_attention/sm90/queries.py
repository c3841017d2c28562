"""What the rows of a tile of queries are, and how they come to shared memory.

Of one head, row r is query m0 + r. Of all heads of a group, which have the same keys, row r is query m0 + r // HEADS of
head h + r % HEADS: a box has HEADS lines for each query, and what rows are left hold anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import i32, verb
from ...tile.boxes import Corner, box_tile
from ...tile.swizzle import Operand
from ..tile_scheduler import ROWS_OF_A_HEAD, Rows
from .config import BOX, Sm90Config


class Queries(Rows):
    """The verbs."""

    nbytes: int  # that are loaded
    at: Callable[..., Any]  # (stage) -> byte of shared memory where they begin
    load: Callable[..., None]  # (smem, stage, q_map, task, b, full): by one thread


def queries_of(config: Sm90Config, tile: Operand) -> Queries:
    """The verbs for a tile at the beginning of shared memory."""
    return _of_a_group(config, tile) if config.heads > 1 else _of_a_head(tile)


def _of_a_head(tile: Operand) -> Queries:
    box = box_tile(tile, 0, 2)

    @verb
    def load(smem, stage, q_map, task, b, full):
        box.load(smem, stage, q_map, Corner(i32(task.q_first + task.m0), 0, (task.h, b)), full)

    row = ROWS_OF_A_HEAD
    return Queries(nbytes=tile.nbytes, at=box.at, load=load, query=row.query, head=row.head, there=row.there)


def _of_a_group(config: Sm90Config, tile: Operand) -> Queries:
    box, HEADS, ROWS_THERE = box_tile(tile, 0, 3), config.heads, config.queries * config.heads
    nbytes = ROWS_THERE * tile.span * (tile.width * tile.itemsize // tile.span)

    @verb
    def load(smem, stage, q_map, task, b, full):
        group, token = i32(task.h // HEADS), i32(task.q_first + task.m0)
        box.load(smem, stage, q_map, Corner(i32(0), 0, (token, group, b)), full)

    @verb
    def query(task, row):
        return i32(task.m0 + row // HEADS)

    @verb
    def head(task, row):
        return i32(task.h + row % HEADS)

    @verb
    def there(task, row):
        return (row < ROWS_THERE) & (task.m0 + row // HEADS < task.Sq)

    return Queries.from_locals(locals(), at=box.at)


def box_of_group(config: Sm90Config) -> tuple[int, ...]:
    """The box of q as [B, groups, S, HEADS, D]."""
    return (1, 1, config.queries, config.heads, BOX)
