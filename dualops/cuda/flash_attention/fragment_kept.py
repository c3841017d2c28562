"""Which probabilities of a tile stay, in the registers of whoever multiplies: known before there are scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..backend import Namespace, cuda, f32, i32, u32, u64, verb
from ..tile.numbers import numbers
from ..tile.products import opaque_i32
from ..tile.rows import FULL_WARP, shfl_idx_i32
from ..tile.softmax_rows import LANES
from .fragment_places import Places, my_row
from .options import OptionChain

CALLS = 2  # each of eight probabilities, at once: they fill one another's delays
OF_MY_KEY = 0b01010101  # of a call's eight, those of its first key, and of the key 8 further


class FragmentKept(Namespace):
    """The verbs, for quads of probabilities."""

    # (options, where) -> a bit for each probability: whether it stays. Asked while products run, in a loop whose bits
    # the assembler can't put off until they are over
    keeps: Callable[..., Any]
    keep: Callable[..., None]  # (probs, kept): those that stay are as they were, the others 0
    growth: Callable[..., Any]  # (options) -> what those that stay are to be multiplied by
    again: Callable[..., Any]  # (kept) -> the same bits: weights found before are not kept in registers
    weight: Callable[..., Any]  # (kept, growth, n) -> of number n of mine: growth or 0; 1 where nothing is weighed


def fragment_kept(chain: OptionChain, places: Places, quads: int, *, transposed: bool = False) -> FragmentKept:
    """transposed: rows are keys and columns queries."""
    word = u32 if quads <= 8 else u64  # registers are few
    num, ALL = numbers(f32), word((1 << 4 * quads) - 1)
    step = 2 * CALLS if quads % (2 * CALLS) == 0 else 2

    @verb
    def eight_of_queries(options, where, j):
        corner = places.at_inside(where, my_row(), places.first(where), i32(8 * j), f32(0))
        return word(chain.keeps(options, corner))

    @verb
    def eight_of_keys(options, where, j):
        """A call is of two keys and one query, and of those 8 further: the lane of the key beside has asked for the
        query beside.
        """
        odd, lane = my_row() % 2, i32(u32(cuda.threadIdx.x) % u32(32))
        corner = places.at_inside(where, i32(my_row() - odd), places.first(where) + odd, i32(8 * j), f32(0))
        mine = i32(chain.keeps(options, corner))
        beside = shfl_idx_i32(mine, i32(lane ^ LANES), FULL_WARP)
        first, second = (beside, mine) if odd else (mine, beside)
        return word(u32((first >> odd) & OF_MY_KEY) | u32(((second >> odd) & OF_MY_KEY) << 1))

    eight = eight_of_keys if transposed else eight_of_queries

    @verb
    def keeps(options, where):
        kept, j = ALL, i32(0)
        if chain.weighs:
            kept = word(0)
            while j < quads:
                for beside in range(0, step, 2):
                    kept |= word(eight(options, where, i32(j + beside)) << word(4 * (j + beside)))
                j = opaque_i32(j + step)
        return kept

    @verb
    def stays(kept, n):
        """A key's bits are of it and the key 8 further, of each four: two queries, and those 8 further."""
        if transposed:
            n = n // 8 * 8 + n // 2 % 2 * 4 + n // 4 % 2 * 2 + n % 2
        return (u32(kept >> word(32 * (n // 32))) & u32(1 << n % 32)) != u32(0)

    @verb
    def keep(probs, kept):
        if chain.weighs:
            for n in range(4 * quads):
                if not stays(kept, n):
                    probs[n] = num.zero

    @verb
    def growth(options):
        return chain.growth(options)

    @verb
    def of_this_lane(bits):
        """By way of a shuffle, which no compiler sees through."""
        return u32(shfl_idx_i32(i32(bits), i32(u32(cuda.threadIdx.x) % u32(32)), FULL_WARP))

    @verb
    def again(kept):
        if not chain.weighs:
            return kept
        if quads <= 8:
            return word(of_this_lane(kept))
        return word(u64(of_this_lane(u32(kept))) | u64(u64(of_this_lane(u32(kept >> u64(32)))) << u64(32)))

    @verb
    def weight(kept, growth, n):
        if chain.weighs:
            return growth if stays(kept, n) else num.zero
        return f32(1)

    return FragmentKept(keeps=keeps, keep=keep, growth=growth, again=again, weight=weight)
