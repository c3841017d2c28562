"""Work of which blocks draw one piece after the other: a thread draws, and hands on to the others what it is.

    producer                                    consumers
    ... slots.numbers[tickets.place(n) ...]     at = tickets.take(slots, n)
    tickets.hand(slots, n)                      ... slots.numbers[at ...]

A block begins with the piece of its own number; those behind it are drawn from a counter in global memory that was 0,
so that who is done sooner does more. Pieces that are all alike are `shared` instead: a block has as many as another,
nothing is drawn, and no launch has to clear a counter (attention of 512 and 2048 keys is 2 to 4 % faster so). Pieces
are counted by `n`, for producer and consumers alike; of each there are `size` numbers. There are `places` for pieces on
their way, and none is asked whether it was read: before piece n is handed on, the producer has waited for all consumers
to be through with something of piece n - places, as by filling one of places - 1 stages for n - 1.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, i32, i64, members, noun, u32, u64, verb
from ..ptx.mbarrier import mbarrier_arrive, mbarrier_init, mbarrier_wait_cta
from ..ptx.memory import atom_add_i64


class Slots(NamedTuple):
    """Numbers on their way, in shared memory, and the mbarriers that tell that they are there."""

    numbers: Any  # [places * size]
    full: Any


@cache
@noun
def work_queue(places: int, size: int, shared: bool = False, word: int = 0) -> Members:
    """The verbs for so many places of so many numbers; where pieces are shared out, the counter is not looked at. word:
    which of the counter's is this kernel's own.
    """
    COUNT, NUMBERS, WORD = u32(places), places * size, i64(word)

    @verb
    def slots():
        """Return the shared arrays; once in a kernel, by all threads."""
        return Slots(cuda.shared.array(NUMBERS, i32), cuda.shared.array(places, u64))

    @verb
    def init(slots):
        """Initialize the barriers; by one thread, before all meet."""
        for place in range(places):
            mbarrier_init(slots.full, place, 1)

    @verb
    def _draw(counter, number):
        return i32(cuda.gridDim.x + atom_add_i64(counter, WORD, i64(1)))

    @verb
    def _share(counter, number):
        return i32(number + cuda.gridDim.x)

    @verb
    def place(n):
        """Return where the numbers of a piece begin."""
        return i32(u32(n) % COUNT * size)

    @verb
    def hand(slots, n):
        """Signal that the numbers of a piece are written; by one thread."""
        mbarrier_arrive(slots.full, i32(u32(n) % COUNT))

    @verb
    def take(slots, n):
        """Wait until the numbers of a piece are written. Return where they begin."""
        mbarrier_wait_cta(slots.full, i32(u32(n) % COUNT), u32(n) // COUNT & 1)
        return place(n)

    return members(
        locals(),
        draw=_share if shared else _draw,  # (counter, number) -> the number of the piece after this one of the block
    )
