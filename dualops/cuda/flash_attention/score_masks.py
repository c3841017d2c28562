"""Masks of a tile's scores, in registers: keys that are padding, and probabilities that dropout keeps.

If masks depend on keys alone, a warp evaluates each key once, not once per row. In every eight columns a thread has
numbers 2 * c and 2 * c + 1, where c is its number among four lanes. In ballot c, lane l evaluates column 8 * (l // 2) +
2 * c + l % 2. So the ballot's bits are the columns of lanes c, in order.

Dropout depends on no score. Its bits may be computed before there are scores, and kept, or computed when probabilities
are packed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, f32, i32, members, noun, u32, u64, verb
from ..tile.numbers import numbers
from ..tile.products import opaque_i32
from ..tile.rows import FULL_WARP, shfl_idx_i32, vote_ballot
from ..tile.softmax_rows import LANES
from ..tile.unrolled import unrolled
from .options import OptionChain
from .score_coords import Places, my_row

EVERY = 0xFFFFFFFF


class Seen(NamedTuple):
    """Keys of a tile that are seen."""

    mine: Any  # a bit for each of my columns, or, transposed, for my two rows
    every: Any  # the bits that all lanes have: all of them if every key is seen


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
    def ask(options, where):
        """Return the argument of `sees`, which may still be in flight from memory; 0 if masks depend on more than
        keys.
        """
        row = my_row()
        if not chain.picks_keys:
            return i32(0)
        if transposed:
            column = places.first(where)
            return i32(_asked(options, where, row, column) + 2 * _asked(options, where, i32(row + 8), column))
        lane = u32(cuda.threadIdx.x) % u32(32)
        first = i32(where.n0 + i32(lane // u32(2) * u32(8) + lane % u32(2)))
        a, b = _asked(options, where, row, first), _asked(options, where, row, i32(first + 2))
        c, d = _asked(options, where, row, i32(first + 4)), _asked(options, where, row, i32(first + 6))
        return i32(a + 2 * b + 4 * c + 8 * d)

    @verb
    def sees(asked):
        """Return `Seen`; nothing if masks depend on more than keys."""
        if not chain.picks_keys:
            return Seen(u32(0), u32(0))
        if transposed:
            return Seen(u32(asked), vote_ballot(i32(asked == 3), FULL_WARP))
        c = u32(cuda.threadIdx.x) % u32(LANES)
        of_0, of_1 = vote_ballot(i32(asked & 1), FULL_WARP), vote_ballot(i32(asked & 2), FULL_WARP)
        of_2, of_3 = vote_ballot(i32(asked & 4), FULL_WARP), vote_ballot(i32(asked & 8), FULL_WARP)
        low, high = (of_1 if c % u32(2) else of_0), (of_3 if c % u32(2) else of_2)
        return Seen(high if c >= u32(2) else low, u32(u32(of_0 & of_1) & u32(of_2 & of_3)))

    @verb
    def of_row(seen, h):
        """Return a bit for each of my columns, in my row h of two."""
        if transposed:
            return u32(EVERY) if seen.mine & u32(1 << h) != u32(0) else u32(0)
        return seen.mine

    @verb
    def all_seen(seen):
        """Return whether no key is hidden."""
        return u32(seen.every & ALL) == ALL

    return locals()


WORDS = 16  # with two bits each, which fill 32
CALLS = 4  # that return them, each for eight probabilities
HALF = 16
BIT = 1 << HALF | 1  # of both halves


@noun
def dropout_mask(
    chain: OptionChain, places: Places, quads: int, *, transposed: bool = False, parts: int = 1
) -> Members:
    """The verbs, for quads of probabilities.

    transposed: rows are keys and columns queries. parts: of a probability; a packed word has one part of two.
    """
    word = u32 if quads <= 2 * CALLS else u64  # registers are few
    num, ALL = numbers(f32), word((1 << 4 * quads) - 1)
    LOOP = quads > 2 * CALLS and quads % (2 * CALLS) == 0

    @verb
    def _some(options, where, seed, first, calls):
        """Return the bits of `calls` calls. Call n is for quads 2 * n and 2 * n + 1."""
        odd = i32(my_row() % 2) if transposed else i32(0)
        corner = places.at_inside(where, i32(my_row() - odd), places.first(where) + odd, i32(0), f32(0))
        kept = u32(0)
        for n in range(calls):
            further = i32(first + n)
            below, right = (further, i32(0)) if transposed else (i32(0), further)
            a, b, c, d = chain.keeps(options, corner, seed, below, right)
            of_two = u32((a & u32(BIT << 4 * n)) | (b & u32(BIT << (4 * n + 1))))
            kept |= u32(of_two | (c & u32(BIT << (4 * n + 2))) | (d & u32(BIT << (4 * n + 3))))
        return _of_my_key(kept, odd) if transposed else kept

    @verb
    def _of_my_key(mine, odd):
        """Exchange bits: a call is for two keys and one query, and the lane of the neighbouring key evaluated the
        neighbouring query.
        """
        neighbour = u32(shfl_idx_i32(i32(mine), i32(u32(cuda.threadIdx.x) % u32(32) ^ u32(LANES)), FULL_WARP))
        if odd:
            return u32((neighbour >> u32(HALF)) | (mine & u32(0xFFFF0000)))
        return u32((mine & u32(0xFFFF)) | (neighbour << u32(HALF)))

    @verb
    def keeps(options, where, seed):
        """Return a bit for each probability: whether dropout keeps it."""
        kept, j = ALL, i32(0)
        if chain.weighs:
            if LOOP:
                while j < quads // 2:
                    found = _some(options, where, seed, j, CALLS)
                    kept = u64((kept >> u64(32)) | (u64(found) << u64(32)))
                    j = opaque_i32(j + CALLS)
            elif quads > 2 * CALLS:
                kept = u64(_some(options, where, seed, i32(0), CALLS))
                kept |= u64(_some(options, where, seed, i32(CALLS), quads // 2 - CALLS)) << u64(32)
            else:
                kept = word(_some(options, where, seed, i32(0), quads // 2))
        return kept

    @verb
    def _stays(kept, n):
        if transposed:  # a call's words are two queries of a key, 8 apart, and those of the key 8 further
            n = n // 8 * 8 + n // 2 % 2 * 4 + n // 4 % 2 * 2 + n % 2
        bit = n % 32 // 2 + n % 2 * HALF
        return (u32(kept >> word(32 * (n // 32))) & u32(1 << bit)) != u32(0)

    # for every other probability: their bits are neighbours, and the assembler turns seven at once into predicates
    @unrolled(first + e for first in range(0, 4 * quads, 2 * WORDS) for e in range(2))
    def _keep(probs, kept, first):
        for n in range(min(WORDS, 2 * quads - first // 2)):
            if not _stays(kept, first + 2 * n):
                probs[first + 2 * n] = num.zero

    @verb
    def keep(probs, kept):
        """Make the dropped probabilities 0."""
        if chain.weighs:
            _keep(probs, kept)

    @unrolled(range(quads // 2))
    def _drop(probs, options, where, seed, n):
        corner = places.at_inside(where, my_row(), places.first(where), i32(0), f32(0))
        a, b, c, d = chain.keeps(options, corner, seed, i32(0), i32(n))
        for part in range(parts):
            first = 4 * n + 2 * quads * part
            probs[first] &= a
            probs[first + 1] &= b
            probs[first + 2] &= c
            probs[first + 3] &= d

    @verb
    def drop(probs, options, where, seed):
        """Make dropped packed probabilities 0, without bits from before."""
        if chain.weighs:
            _drop(probs, options, where, seed)

    @verb
    def growth(options):
        """Return the factor of kept probabilities."""
        return chain.growth(options)

    @verb
    def _of_this_lane(bits):
        """Return the same bits, through a shuffle, which the compiler can't look through."""
        return u32(shfl_idx_i32(i32(bits), i32(u32(cuda.threadIdx.x) % u32(32)), FULL_WARP))

    @verb
    def again(kept):
        """Return the same bits, so that the compiler does not keep earlier weights in registers."""
        if not chain.weighs:
            return kept
        if quads <= 2 * CALLS:
            return word(_of_this_lane(kept))
        return word(u64(_of_this_lane(u32(kept))) | u64(u64(_of_this_lane(u32(kept >> u64(32)))) << u64(32)))

    @verb
    def weight(kept, growth, n):
        """Return the factor of my probability n: growth or 0; 1 without dropout."""
        if chain.weighs:
            return growth if _stays(kept, n) else num.zero
        return f32(1)

    return members(
        locals(),
        seed=chain.seed,  # (options) -> the argument of `keeps`, the same for all tiles
    )
