"""Which keys of a tile are seen, where masks look at keys alone: each asked once a warp, not once a row.

A thread has of every eight columns numbers 2 * c and 2 * c + 1, c being its number among four lanes. So ballot c asks
lane l for column 8 * (l // 2) + 2 * c + l % 2, and is the word of the lanes c: its bits are their columns in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, f32, i32, members, noun, u32, verb
from ..tile.rows import FULL_WARP, vote_ballot
from ..tile.softmax_rows import LANES
from .options import OptionChain
from .score_coords import Places, my_row

EVERY = 0xFFFFFFFF


class Seen(NamedTuple):
    """Keys of a tile."""

    mine: Any  # a bit for each of my columns; transposed, for my two rows
    every: Any  # the bits that all lanes have: all, where every key is seen


@noun
def fragment_keys(chain: OptionChain, places: Places, columns: int, *, transposed: bool) -> Members:
    """The verbs, by all lanes of a warp.

    transposed: rows are keys and columns queries.
    """
    ALL, NOTHING = u32(EVERY if transposed else (1 << columns // 4) - 1), f32(0)

    @verb
    def _asked(options, where, row, column):
        return i32(chain.pick(options, places.at(where, row, column, 0, NOTHING)))

    @verb
    def _ask_nothing(options, where):
        return i32(0)

    @verb
    def _ask_columns(options, where):
        lane, row = u32(cuda.threadIdx.x) % u32(32), my_row()
        first = i32(where.n0 + i32(lane // u32(2) * u32(8) + lane % u32(2)))
        a, b = _asked(options, where, row, first), _asked(options, where, row, i32(first + 2))
        c, d = _asked(options, where, row, i32(first + 4)), _asked(options, where, row, i32(first + 6))
        return i32(a + 2 * b + 4 * c + 8 * d)

    @verb
    def _ask_rows(options, where):
        row, column = my_row(), places.first(where)
        return i32(_asked(options, where, row, column) + 2 * _asked(options, where, i32(row + 8), column))

    @verb
    def _sees_nothing(asked):
        return Seen(u32(0), u32(0))

    @verb
    def _sees_columns(asked):
        c = u32(cuda.threadIdx.x) % u32(LANES)
        of_0, of_1 = vote_ballot(i32(asked & 1), FULL_WARP), vote_ballot(i32(asked & 2), FULL_WARP)
        of_2, of_3 = vote_ballot(i32(asked & 4), FULL_WARP), vote_ballot(i32(asked & 8), FULL_WARP)
        low, high = (of_1 if c % u32(2) else of_0), (of_3 if c % u32(2) else of_2)
        return Seen(high if c >= u32(2) else low, u32(u32(of_0 & of_1) & u32(of_2 & of_3)))

    @verb
    def _sees_rows(asked):
        return Seen(u32(asked), vote_ballot(i32(asked == 3), FULL_WARP))

    @verb
    def of_row(seen, h):
        """Return a bit for each of my columns, in my row number h."""
        if transposed:
            return u32(EVERY) if seen.mine & u32(1 << h) != u32(0) else u32(0)
        return seen.mine

    @verb
    def all_seen(seen):
        """Return whether no key is hidden."""
        return u32(seen.every & ALL) == ALL

    ask, sees = (_ask_rows, _sees_rows) if transposed else (_ask_columns, _sees_columns)
    if not chain.picks_keys:
        ask, sees = _ask_nothing, _sees_nothing
    return members(
        locals(),
        # (options, where) -> what `sees` takes, which may be on its way from memory still; nothing where masks look at
        # more than keys
        ask=ask,
        sees=sees,  # (asked); nothing where masks look at more than keys
    )
