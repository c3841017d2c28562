"""lse and delta of a tile's queries, where the queries are columns of scores: from memory through shared memory.

A warp brings those of a tile beside the copies of its boxes, so that nothing is asked of their addresses. A thread
needs the columns that it has scores of, two of every eight, and finds them side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...backend import Namespace, cuda, f32, i32, verb
from ...tile.numbers import LOG2_E, numbers
from ...tile.softmax_rows import LANES
from ...views import start
from .dkv_config import DkvConfig


class Columns(Namespace):
    """The verbs. lse is to base 2 there, and 0 for a query that sees nothing, whose scores are all masked."""

    slots: Callable[..., Any]  # () -> the shared array; once in a kernel, by all threads
    own: Callable[..., Any]  # () -> a local array for what a lane of the bringing warp has on its way
    fetch: Callable[..., None]  # (own, lse, delta, task, h, m0): by all lanes of a warp
    put: Callable[..., None]  # (slots, stage, own): into a stage that is free
    lse: Callable[..., Any]  # (stage) -> where those of my columns begin: number 2 * j + e of column 8 * j + e of mine
    delta: Callable[..., Any]  # (stage) -> the same


def columns_of(config: DkvConfig) -> Columns:
    """The verbs of tiles of the Config's queries."""
    num, LOG2 = numbers(f32), f32(LOG2_E)
    BLOCK_Q, LANE, STAGE = config.block_q, config.lane_columns, 2 * LANES * config.lane_columns
    SIZE, PER_LANE = config.stages * STAGE, -(-config.block_q // 32)
    OWN, DELTA = 2 * PER_LANE, LANES * config.lane_columns

    @verb
    def slots():
        return cuda.shared.array(SIZE, f32, alignment=16)

    @verb
    def own():
        return cuda.local.array(OWN, f32)

    @verb
    def fetch(own, lse, delta, task, h, m0):
        for n in range(PER_LANE):
            m = i32(m0 + 32 * n + cuda.threadIdx.x % 32)
            own[2 * n], own[2 * n + 1] = num.zero, num.zero
            if m < task.Sq:
                own[2 * n] = lse.data[start(lse, task.b, h, task.q_first + m)]
                own[2 * n + 1] = delta.data[start(delta, task.b, h, task.q_first + m)]

    @verb
    def put(slots, stage, own):
        for n in range(PER_LANE):
            column = i32(32 * n + cuda.threadIdx.x % 32)
            if column < BLOCK_Q:
                at = i32(stage * STAGE + column % 8 // 2 * LANE + column // 8 * 2 + column % 2)
                slots[at] = num.base(own[2 * n]) * LOG2
                slots[at + DELTA] = own[2 * n + 1]

    @verb
    def lse_at(stage):
        return i32(stage * STAGE + cuda.threadIdx.x % LANES * LANE)

    @verb
    def delta_at(stage):
        return i32(stage * STAGE + DELTA + cuda.threadIdx.x % LANES * LANE)

    return Columns(slots=slots, own=own, fetch=fetch, put=put, lse=lse_at, delta=delta_at)
