"""The update of the state by a chunk's tokens: state = fade * state + (decayed K).T @ V.

If o alone reads the state, which it rounds, the product is added to the state directly, with K as one number of 16
bits (`weighted_sums`). If the state is a result, K has three parts of bfloat16, which keep all digits of float32, and a
chunk's contribution is a sum of its own (`exact_sums`). Tensor cores round toward zero, and threads to the nearest:
after a few chunks the error of one sum is larger than the rule of accuracy allows (measured, for 700 tokens without
decay 1.4 times as large, for 3000 4.7 times).

For wide heads the state is transposed, so that V takes K's place (`state_of_values`). No registers are left for another
sum as large as the state. So a chunk's contribution is computed for 64 keys at a time, and all parts of V stay
(`exact_pieces`).

    acc [64, n] += (weights * X).T [64, tokens] @ Y [tokens, n]     X [tokens, 64 a warpgroup] and Y [tokens, n] tiles

Parts are truncated, not rounded (`split_bf16x3`). The smallest is multiplied first: added to a large sum, it would add
its roundings to the sum. The first part is packed while the others are multiplied, one half of the steps after the
other. Element e of a thread's accumulators is element e of its part of a left factor (`fragment`), so parts are packed
in place. An infinite accumulator becomes NaN. An infinite number of X is its own upper part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import Members, Noun, cuda, f32, i32, members, noun, u32, verb
from ...ptx.convert import pack_bf16x2, unpack_bf16x2
from ...tile.a_fragment import words_of_columns
from ...tile.products import recomputed_i32
from ...tile.split_bf16x3 import PARTS, packed_parts, upper_part
from ...tile.swizzle import Operand
from ...tile.unrolled import local_array
from ...tile.warpgroup import register_mma
from .config import BOX, DTYPE
from .states import rest


@noun
def weighted_sums(x: Operand, y: Operand, weight: Callable[..., Any], *, same_columns: bool = False) -> Members:
    """The verbs for tiles of bfloat16: x in whole boxes, y "mn". weight(args, token): a verb that returns the float32
    factor of a token of the tile. same_columns: see `words_of_columns`.

    Called by all threads of a warpgroup.
    """
    mma, columns = register_mma(DTYPE, y), words_of_columns(x, same_columns=same_columns)
    steps = columns.steps

    @verb
    def _start(acc, smem, places, args, adds):
        left, lane = mma.left(), i32(u32(cuda.threadIdx.x) % u32(32))
        first = columns.first(places[0], cuda.threadIdx.x)
        for step in range(steps):
            columns.load(left, 4 * step, smem, first, step)
            for half in range(2):
                token = i32(16 * step + 8 * half + 2 * (lane % 4))
                here, next_one = weight(args, token), weight(args, i32(token + 1))
                for row in range(2):
                    word = 4 * step + 2 * half + row
                    low, high = unpack_bf16x2(left[word])
                    left[word] = pack_bf16x2(low * here, high * next_one)
        mma.add(acc, left, smem, places[1], adds)

    @verb
    def add(acc, smem, places, args):
        """Start to add the product of X and Y to acc."""
        _start(acc, smem, places, args, 1)

    @verb
    def multiply(acc, smem, places, args):
        """Start to write the product to acc."""
        _start(acc, smem, places, args, 0)

    return members(
        locals(),
        size=mma.size,  # accumulators of a thread
        fragment=mma.fragment,  # () -> a local array for acc
        wait=mma.wait,  # (acc)
    )


HALVES = 2  # the steps are packed and multiplied in halves; more steps at once take more registers
WORDS = 4  # of a thread, for a step


@verb
def below(number):
    """Return what is left below the upper part."""
    return f32(number - upper_part(number))


@verb
def below_any(number):
    """Return what is left below the upper part; 0 for an infinite number."""
    return rest(below(number))


@noun
def exact_pieces(x: Operand, piece: Operand, weight: Callable[..., Any]) -> Members:
    """The verbs for a warpgroup's 64 columns of X, which begin at X's place. weight: as of `exact_sums`.

    All parts are packed once and used for all pieces of Y, 12 words a step. out is as small as a piece.

    Called by all threads of a warpgroup. X may have infinite numbers.
    """
    mma, steps = register_mma(DTYPE, piece, some=tuple(range(piece.steps)) * PARTS), piece.steps
    begin, take = _weighted(x, weight, same_columns=True)
    MIDDLE, UPPER = WORDS * steps, 2 * WORDS * steps  # where these parts begin, after the lower ones

    @verb
    def fill(words, left, smem):
        """Pack all parts of X. left: as of `exact_sums`."""
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
    def multiply(out, words, left, smem, y_at):
        """Multiply with a piece of Y and wait for out."""
        mma.add(out, words, smem, y_at, 0)
        mma.wait(out)

    return members(
        locals(),
        size=mma.size,  # accumulators of a thread, of a piece
        fragment=mma.fragment,  # () -> a local array for out
        words=mma.left,  # () -> a local array for all parts of X
    )


def _weighted(
    x: Operand, weight: Callable[..., Any], *, same_columns: bool = False
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return two verbs for X's columns. same_columns: see `words_of_columns`.

    begin(left) -> begun, values that registers do not keep; take(eight, begun, smem, step): a thread's numbers of a
    step of the left factor.
    """
    columns = words_of_columns(x, same_columns=same_columns)

    @verb
    def begin(left):
        (x_at, args), tid = left, recomputed_i32(i32(cuda.threadIdx.x))
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
def exact_sums(x: Operand, b: Operand, weight: Callable[..., Any], *, overlapped: bool = True) -> Members:
    """The verbs. weight(args, token): a verb that returns the factor of a token of the tile. X may have infinite
    numbers. overlapped: one half is packed during the products of the other half, which takes twice the registers for
    words.

    Called by all threads of a warpgroup.
    """
    begin, take = _weighted(x, weight)
    mma, half = register_mma(DTYPE, b), b.steps // HALVES
    of_half = [tuple(range(half * number, half * (number + 1))) for number in range(HALVES)]

    def multiplied(some: tuple[int, ...], lower: bool) -> Callable[..., None]:
        """Of these steps all lower parts and then all middle ones, or the upper parts."""
        product, FIRST, COUNT = register_mma(DTYPE, b, some=2 * some if lower else some), some[0], len(some)

        @verb
        def multiply_parts(out, words, begun, smem_and_b):
            (smem, b_at), eight = smem_and_b, cuda.local.array(2 * WORDS, f32)
            for step in range(COUNT):
                take(eight, begun, smem, FIRST + step)
                for word in range(WORDS):
                    at, one, other = WORDS * step + word, eight[2 * word], eight[2 * word + 1]
                    if lower:
                        one, other = below_any(one), below_any(other)
                        words[WORDS * COUNT + at] = packed_parts(one, other)
                        words[at] = packed_parts(below(one), below(other))
                    else:
                        words[at] = packed_parts(one, other)
            product.add(out, words, smem, b_at, 0 if lower and FIRST == 0 else 1)

        return multiply_parts

    lower, other_lower = (multiplied(some, True) for some in of_half)
    upper, other_upper = (multiplied(some, False) for some in of_half)
    let_go = mma.wait_but_one if overlapped else mma.wait

    @verb
    def words():
        """Return local arrays for parts."""
        words = mma.left()
        if overlapped:
            return words, mma.left()
        return words, words

    @verb
    def fill(words, left, smem):
        """Do nothing: `multiply` packs the parts."""

    @verb
    def multiply(out, both_words, left, smem, b_at):
        """Multiply and wait for out. left: X's place and the arguments of `weight`."""
        (words, other_words), place = both_words, (smem, b_at)
        begun = begin(left)
        lower(out, words, begun, place)
        if not overlapped:
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


def state_sums(k: Operand, v: Operand, exact: bool, weight: Callable[..., Any], *, overlapped: bool = False) -> Noun:
    """weight(args, token): the factor of a token of the chunk. overlapped: see `exact_sums`."""
    if exact:
        return _as_a_result(exact_sums(k, v, weight, overlapped=overlapped), 1, 0)
    return _rounded(weighted_sums(k, v, weight))


def state_of_values(v: Operand, k: Operand, exact: bool, weight: Callable[..., Any]) -> Noun:
    """For wide heads: state = fade * state + (decayed V).T @ K, for a warpgroup's 64 columns of V and all of its keys;
    `places` are those of V and K.
    """
    if exact:
        return _as_a_result(exact_pieces(v, Operand(k.lines, BOX, 2, 128, "mn"), weight), k.width // BOX, k.box)
    return _rounded(weighted_sums(v, k, weight, same_columns=True))


@noun
def _rounded(sums: Noun) -> Members:
    """The verbs for a state of a warpgroup that o alone reads. `_as_a_result` has the same verbs."""

    @verb
    def room():
        """Return local arrays that `add` needs too."""
        return ()

    @verb
    def fade(state, by):
        """Apply the part of the fade that comes before `add`."""
        for j in range(sums.size // 4):
            for e in range(4):
                state[4 * j + e] *= by

    @verb
    def add(state, room, smem, places, args, by):
        """Add the chunk's product. places: of K and V. args: of the weight. Complete when it returns."""
        sums.add(state, smem, places, args)
        sums.wait(state)

    return members(locals(), size=sums.size, fragment=sums.fragment)


@noun
def _as_a_result(sums: Noun, boxes: int, box: int) -> Members:
    """The verbs for a state that is a result. sums: for a box of the right factor. box: bytes from one to the next."""
    SIZE = boxes * sums.size

    @verb
    def room():
        return sums.fragment(), sums.words()

    @verb
    def fade(state, by):
        """Do nothing: `add` multiplies each number and adds to it at once."""

    @verb
    def add(state, room, smem, places, args, by):
        (more, words), left = room, (places[0], args)
        sums.fill(words, left, smem)
        for n in range(boxes):
            sums.multiply(more, words, left, smem, i32(places[1] + n * box))
            for e in range(sums.size):
                state[sums.size * n + e] = state[sums.size * n + e] * by + more[e]

    return members(locals(), size=SIZE, fragment=local_array(SIZE, f32))
