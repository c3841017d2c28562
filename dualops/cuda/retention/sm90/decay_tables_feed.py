"""The tables of log_decay (`decay_tables`) between the warp that computes them and the consumers.

    the warp, of a chunk            consumers
    put(...)                        wait(barriers, i);  ...;  release(barriers, i)

There is one buffer. The tables of a chunk are written when all consumers have read those of the previous chunk.
"""

from __future__ import annotations

from functools import cache

from ...compiler.backend import Members, i32, members, noun, verb
from ...tile.pipeline import pipeline
from ...tile.second_barrier import second_barrier
from .decay_tables import decay_tables


@cache
@noun
def decay_tables_feed(at: int, back: bool, warps: int, *, states: bool = True) -> Members:
    """The verbs for tables from byte `at` on, read by `warps` warps; back, states: as for `decay_tables`. `i` numbers
    the chunks of a block.
    """
    tables_of, pipe, written = decay_tables(at, back, states=states), pipeline(1, 0, warps), second_barrier(1, 0)

    @verb
    def put(tables, barriers, i, own, logs, place, rows):
        """Write the tables of the chunk that begins with m0."""
        b, h, m0 = place
        tables_of.fetch(own, logs, b, h, m0, rows)
        pipe.claim(barriers, i)
        tables_of.put(tables, own, i32(rows - m0))
        written.hand(barriers.full, i)

    @verb
    def release(barriers, i):
        """Release the tables after the lanes of my warp have read them."""
        written.leave()
        pipe.release(barriers, i)

    return members(
        locals(),
        barriers=pipe.barriers,  # () -> in shared memory; once in a kernel, by all threads
        init=pipe.init,  # (barriers): by one thread, before the `start` of a pipeline
        eights=tables_of.eights,  # (): an array, see `decay_tables`
        own=tables_of.own,  # (): an array, see `decay_tables`
        wait=pipe.wait,  # (barriers, i): until they are written
    )
