"""Sums of what several blocks add to one place in memory, in an order that is always the same.

A place has a flag: how many blocks have added. Who comes as number r waits until it is r, adds by a bulk copy, waits
until that is written, and makes it r + 1. The first one stores, so that nothing need be cleared but the flags. Who
reads the sum waits until all have added; that may be a grid that overlaps the one that adds.
"""

from __future__ import annotations

from functools import cache

from ..compiler.backend import Members, i32, i64, noun, u32, verb
from ..ptx.async_copy import (
    cp_async_bulk_commit_group,
    cp_async_bulk_store,
    cp_async_bulk_wait_group,
    cp_reduce_async_bulk_add_f32,
)
from ..ptx.memory import atom_add_i64, st_release_i64, wait_for_i64


@verb
def draw(counter):
    """The number of a piece of work, 0 first: who draws it later waits for those before, which have begun then."""
    return i32(atom_add_i64(counter, i64(0), i64(1)))


@verb
def all_added(flags, flag, count):
    """Wait until `count` blocks have added; then threads of this block that come here may read the sum."""
    wait_for_i64(flags, flag, i64(count))


@cache
@noun
def ordered_sums(nbytes: int) -> Members:
    """The verb for so many bytes at a time.

    Called by one thread of a block.
    """

    @verb
    def add(sums, index, smem, at, flags, flag, rank):
        """Add float32 numbers, from an element of smem on, to those of sums from index on."""
        wait_for_i64(flags, flag, i64(rank))
        if rank == 0:
            cp_async_bulk_store(sums, index, smem, at, u32(nbytes))
        else:
            cp_reduce_async_bulk_add_f32(sums, index, smem, at, u32(nbytes))
        cp_async_bulk_commit_group()
        cp_async_bulk_wait_group(0)
        st_release_i64(flags, flag, i64(rank + 1))

    return locals()
