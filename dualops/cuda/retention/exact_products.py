"""Products whose left factor has all digits of float32, in three parts of bfloat16; the right one has 16 bits, and one.

    out [64, n] = acc [64, K] @ B [K, n]                            `exact_left`: acc are a warpgroup's accumulators
    out [64, n] = (weights * X).T [64, tokens] @ Y [tokens, n]      `exact_sums`: as `state_smem.weighted_sums` has it;
                                                                    `exact_pieces`: some columns of Y at a time

Parts are cut off, not rounded (`split_bf16x3`), and the smallest is multiplied first: added to a large sum it would
cost it as many roundings again. out holds nothing else for the same reason: tensor cores round toward zero, which adds
up in a sum of many products; threads, which round to the nearest, add what is to be added. The first part is packed
while the others are multiplied, half of the steps after the other.

Element e of a thread's accumulators is element e of what it has of a left factor (`fragment`), so that parts are packed
where they are. Of an infinite accumulator NaN comes; an infinite number of X is its own upper part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..compiler.backend import Members, Noun, cuda, f32, i32, members, noun, u32, verb
from ..ptx.convert import unpack_bf16x2
from ..tile.a_fragment import words_of_columns
from ..tile.products import anew_i32
from ..tile.split_bf16x3 import PARTS, packed_parts, upper_part
from ..tile.swizzle import Operand
from ..tile.warpgroup import register_mma
from .state_smem import DTYPE, rest

HALVES = 2  # in which parts are packed and multiplied: more steps at once would want more registers
WORDS = 4  # of a thread, of a step


ExactProduct = Noun  # what `_in_parts` makes


@verb
def below(number):
    """What cutting off the upper part leaves."""
    return f32(number - upper_part(number))


@verb
def below_any(number):
    """The same: nothing of what is infinite."""
    return rest(below(number))


@cache
def exact_left(b: Operand) -> ExactProduct:
    """For a right factor of bfloat16; `left` are the accumulators."""

    @verb
    def begin(acc):
        return acc

    @verb
    def take(eight, acc, smem, step):
        for e in range(2 * WORDS):
            eight[e] = acc[2 * WORDS * step + e]

    return _in_parts(b, begin, take, below)


def exact_sums(x: Operand, y: Operand, weight: Callable[..., Any], *, beside: bool = True) -> ExactProduct:
    """`left` is X's place, and what weight(args, token) is told: a verb, what a token of the tile is multiplied by. X
    may have infinite numbers. beside: as `_in_parts` has it.
    """
    begin, take = _weighted(x, weight)
    return _in_parts(y, begin, take, below_any, beside=beside)


@noun
def exact_pieces(x: Operand, piece: Operand, weight: Callable[..., Any]) -> Members:
    """The verbs for a warpgroup's 64 columns of X, which begin at X's place; weight: as of `exact_sums`.

    All parts are packed once and stay for all pieces of Y, 12 words a step, and out is as small as a piece is.

    Called by all threads of a warpgroup. X may have infinite numbers.
    """
    mma, steps = register_mma(DTYPE, piece, some=tuple(range(piece.steps)) * PARTS), piece.steps
    begin, take = _weighted(x, weight, alike=True)
    MIDDLE, UPPER = WORDS * steps, 2 * WORDS * steps  # where these parts begin, behind the lower ones

    @verb
    def fill(words, left, smem):
        """Pack all parts of X. left: as `exact_sums` has it."""
        begun, eight = begin(left), cuda.local.array(2 * WORDS, f32)
        for step in range(steps):
            take(eight, begun, smem, step)
            for word in range(WORDS):
                at, one, other = WORDS * step + word, eight[2 * word], eight[2 * word + 1]
                words[UPPER + at] = packed_parts(one, other)
                one, other = below_any(one), below_any(other)
                words[MIDDLE + at] = packed_parts(one, other)
                words[at] = packed_parts(below(one), below(other))

    @verb
    def multiply(out, words, smem, y_at):
        """Multiply with a piece of Y; out is there when it returns."""
        mma.add(out, words, smem, y_at, 0)
        mma.wait(out)

    return members(
        locals(),
        size=mma.size,  # accumulators of a thread, of a piece
        fragment=mma.fragment,  # () -> a local array for out
        words=mma.left,  # () -> a local array for all parts of X
    )


def _weighted(
    x: Operand, weight: Callable[..., Any], *, alike: bool = False
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """`begin` and `take`, as `_in_parts` wants them, of X's columns; alike: as `words_of_columns` has it."""
    columns = words_of_columns(x, alike=alike)

    @verb
    def begin(left):
        (x_at, args), tid = left, anew_i32(i32(cuda.threadIdx.x))
        return columns.first(x_at, tid), i32(2 * i32(u32(tid) % u32(4))), args

    @verb
    def take(eight, begun, smem, step):
        (first, first_token, args), words = begun, cuda.local.array(WORDS, u32)
        columns.load(words, 0, smem, first, step)
        for half in range(2):
            token = i32(first_token + (16 * step + 8 * half))
            here, next_one = weight(args, token), weight(args, i32(token + 1))
            for row in range(2):
                word = 2 * half + row
                low, high = unpack_bf16x2(words[word])
                eight[2 * word], eight[2 * word + 1] = low * here, high * next_one

    return begin, take


@noun
def _in_parts(
    b: Operand, begin: Callable[..., Any], take: Callable[..., None], less: Callable[..., Any], *, beside: bool = True
) -> Members:
    """The verbs, called by all threads of a warpgroup.

    Given verbs: begin(left) -> begun, what is not kept from one time to the next; take(eight, begun, smem, step): a
    thread's numbers of a step of the left factor; less(number): what is below its upper part. beside: a half is packed
    beside the products of the other one, which wants twice the registers for words.
    """
    mma, half = register_mma(DTYPE, b), b.steps // HALVES
    of_half = [tuple(range(half * number, half * (number + 1))) for number in range(HALVES)]

    def lower_parts(some: tuple[int, ...]) -> Callable[..., None]:
        """Of these steps all lower parts, then all middle ones."""
        product, FIRST, COUNT = register_mma(DTYPE, b, some=2 * some), some[0], len(some)

        @verb
        def multiply_lower(out, words, begun, smem_and_b):
            (smem, b_at), eight = smem_and_b, cuda.local.array(2 * WORDS, f32)
            for step in range(COUNT):
                take(eight, begun, smem, FIRST + step)
                for word in range(WORDS):
                    at, one, other = WORDS * step + word, eight[2 * word], eight[2 * word + 1]
                    one, other = less(one), less(other)
                    words[WORDS * COUNT + at] = packed_parts(one, other)
                    words[at] = packed_parts(below(one), below(other))
            product.add(out, words, smem, b_at, 0 if FIRST == 0 else 1)

        return multiply_lower

    def upper_parts(some: tuple[int, ...]) -> Callable[..., None]:
        product, FIRST, COUNT = register_mma(DTYPE, b, some=some), some[0], len(some)

        @verb
        def multiply_upper(out, words, begun, smem_and_b):
            (smem, b_at), eight = smem_and_b, cuda.local.array(2 * WORDS, f32)
            for step in range(COUNT):
                take(eight, begun, smem, FIRST + step)
                for word in range(WORDS):
                    words[WORDS * step + word] = packed_parts(eight[2 * word], eight[2 * word + 1])
            product.add(out, words, smem, b_at, 1)

        return multiply_upper

    lower, other_lower = map(lower_parts, of_half)
    upper, other_upper = map(upper_parts, of_half)
    let_go = mma.wait_but_one if beside else mma.wait

    @verb
    def words():
        """Return local arrays for parts."""
        words = mma.left()
        if beside:
            return words, mma.left()
        return words, words

    @verb
    def multiply(out, both_words, left, smem, b_at):
        """Multiply; out is there when it returns. left: the left factor."""
        (words, other_words), place = both_words, (smem, b_at)
        begun = begin(left)
        lower(out, words, begun, place)
        if not beside:
            mma.wait(out)
        other_lower(out, other_words, begun, place)
        let_go(out)
        begun = begin(left)
        upper(out, words, begun, place)
        let_go(out)
        other_upper(out, other_words, begun, place)
        mma.wait(out)

    return members(
        locals(),
        size=mma.size,  # accumulators of a thread
        fragment=mma.fragment,  # () -> a local array for out
    )
