"""The order in which a block reads its share of a row twice, where only some of its chunks can stay in shared memory.

Chunks are copied one after another into the stages of a ring. At the first reading all come, and the last `kept` of
them stay; at the second these are read first and left, and those before them come again. Copies are numbered as they
start, `chunks + again` a row.

    planned = order.plan(width)
    for k in range(planned.chunks):                        # first reading: copy number i + k
        ...                                               # the stage is free after it where k < planned.again
    for k in range(planned.chunks):                        # second: copy number i + planned.again + k
        chunk = order.second(planned, k)                  # the stage is free after it
    i += planned.chunks + planned.again
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ..compiler.backend import Members, i32, noun, verb


class Planned(NamedTuple):
    """A share of a row: `chunks` chunks, of which the first `again` are copied twice."""

    chunks: int
    again: int


@cache
@noun
def chunk_order(columns: int, kept: int) -> Members:
    """The verbs for chunks of `columns` columns, of which `kept` stay in memory: fewer than the ring has stages."""

    @verb
    def plan(width):
        """Plan the copies of a share of `width` columns."""
        chunks = i32((width + columns - 1) // columns)
        return Planned(chunks, max(chunks - kept, 0))

    @verb
    def copied(planned, k):
        """Return which chunk the k-th copy of a row brings."""
        return k if k < planned.chunks else k - planned.chunks

    @verb
    def second(planned, k):
        """Return which chunk is the k-th of the second reading."""
        return copied(planned, planned.again + k)

    return locals()
