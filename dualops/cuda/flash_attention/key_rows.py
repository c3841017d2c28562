"""What the rows of a tile of keys are, and which tile of queries comes after another, or before it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import i32, verb


class KeyRows(NamedTuple):
    """Rows of dk or dv, as `output` stores those of a tile of queries."""

    b: Any
    h: Any
    m0: Any
    Sq: Any
    q_first: Any


@verb
def key_rows_of(task):
    """Those of a task's keys."""
    return KeyRows(task.b, task.h_kv, task.n0, task.Sk, task.k_first)


@verb
def tile_after(task, h, m0, block_q):
    """Head and first query of the tile after this one: of the same head, or the next one's first."""
    m0 = i32(m0 + block_q)
    return (i32(h), m0) if m0 < task.end else (i32(h + 1), i32(task.first))


@verb
def tile_before(task, h, m0, block_q, last):
    """The same of the tile before this one: of the same head, or the next one's `last`."""
    m0 = i32(m0 - block_q)
    return (i32(h), m0) if m0 >= task.first else (i32(h + 1), i32(last))
