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

from ...compiler.backend import Members, cuda, f32, i32, members, noun, u32, verb
from ...ptx.convert import pack_bf16x2, unpack_bf16x2
from ...tile.a_fragment import words_of_columns
from ...tile.split_bf16x3 import PARTS, packed_parts, upper_part
from ...tile.swizzle import Operand
from ...tile.unrolled import local_array, nothing
from ...tile.warpgroup import register_mma
from .config import BOX, DTYPE
from .states import my_thread_again, rest

WORDS = 4  # of a thread, for a step
HALVES = 2  # the steps are packed and multiplied in halves; more steps at once take more registers


@verb
def below(number):
    """Return what is left below the upper part."""
    return f32(number - upper_part(number))


@verb
def below_any(number):
    """Return what is left below the upper part; 0 for an infinite number."""
    return rest(below(number))


@noun
def weighted_sums(x: Operand, y: Operand, weight: Callable[..., Any], *, same_columns: bool = False) -> Members:
    """The verbs for tiles of bfloat16: x in whole boxes, y "mn". weight(args, token): a verb that returns the float32
    factor of a token of the tile. same_columns: see `words_of_columns`.

    Called by all threads of a warpgroup.
    """
    mma, columns = register_mma(DTYPE, y), words_of_columns(x, same_columns=same_columns)
    steps = columns.steps

    @verb
    def start(acc, smem, places, args, adds):
        """Start acc += the product of X and Y, or acc = the product if adds is 0."""
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

    return members(
        locals(),
        size=mma.size,  # accumulators of a thread
        fragment=mma.fragment,  # () -> a local array for acc
        wait=mma.wait,  # (acc)
    )


@noun
def weighted(x: Operand, weight: Callable[..., Any], *, same_columns: bool = False) -> Members:
    """The verbs that compute the left factor of exact sums. same_columns: see `words_of_columns`."""
    columns = words_of_columns(x, same_columns=same_columns)

    @verb
    def begin(x_at, args):
        """Return the arguments of `take`, which registers do not keep."""
        tid = my_thread_again()
        return columns.first(x_at, tid), i32(2 * i32(u32(tid) % u32(4))), args

    @verb
    def take(eight, begun, smem, step):
        """Compute a thread's numbers of a step."""
        (first, first_token, args), words = begun, cuda.local.array(WORDS, u32)
        columns.load(words, 0, smem, first, step)
        for half in range(2):
            token = i32(first_token + (16 * step + 8 * half))
            here, next_one = weight(args, token), weight(args, i32(token + 1))
            for row in range(2):
                word = 2 * half + row
                low, high = unpack_bf16x2(words[word])
                eight[2 * word], eight[2 * word + 1] = low * here, high * next_one

    return members(locals(), steps=columns.steps)


# --- a state of a warpgroup: three nouns with the same verbs ------------------------------------------


@noun
def rounded(x: Operand, y: Operand, weight: Callable[..., Any], *, same_columns: bool = False) -> Members:
    """The verbs for a state that o alone reads. Arguments of `weighted_sums`."""
    sums = weighted_sums(x, y, weight, same_columns=same_columns)

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
        """Add the chunk's product. places: of X and Y. args: of the weight. Complete when it returns."""
        sums.start(state, smem, places, args, 1)
        sums.wait(state)

    return members(locals(), size=sums.size, fragment=sums.fragment)


@noun
def exact_pieces(x: Operand, y: Operand, weight: Callable[..., Any]) -> Members:
    """The verbs for 64 columns of X, which begin at X's place, and a result. X may have infinite numbers.

    All parts are packed once and used for all boxes of Y, 12 words a step.
    """
    box, boxes, BYTES = Operand(y.lines, BOX, 2, 128, "mn"), y.width // BOX, y.box
    mma = register_mma(DTYPE, box, some=tuple(range(box.steps)) * PARTS)
    columns = weighted(x, weight, same_columns=True)
    MIDDLE, UPPER = WORDS * box.steps, 2 * WORDS * box.steps  # where these parts begin, after the lower ones
    SIZE = boxes * mma.size

    @verb
    def room():
        return mma.fragment(), mma.left()

    @verb
    def add(state, room, smem, places, args, by):
        (out, words), begun, eight = room, columns.begin(places[0], args), cuda.local.array(2 * WORDS, f32)
        for step in range(columns.steps):
            columns.take(eight, begun, smem, step)
            for word in range(WORDS):
                at, one, other = WORDS * step + word, eight[2 * word], eight[2 * word + 1]
                words[UPPER + at] = packed_parts(one, other)
                one, other = below_any(one), below_any(other)
                words[MIDDLE + at] = packed_parts(one, other)
                words[at] = packed_parts(below(one), below(other))
        for n in range(boxes):
            mma.add(out, words, smem, i32(places[1] + n * BYTES), 0)
            mma.wait(out)
            for e in range(mma.size):
                state[mma.size * n + e] = state[mma.size * n + e] * by + out[e]

    return members(locals(), size=SIZE, fragment=local_array(SIZE, f32), fade=nothing(2))


@noun
def exact_sums(x: Operand, y: Operand, weight: Callable[..., Any], *, overlapped: bool) -> Members:
    """The verbs for a result. X may have infinite numbers. overlapped: one half is packed during the products of the
    other half, which takes twice the registers for words.
    """
    columns, mma, half = weighted(x, weight), register_mma(DTYPE, y), y.steps // HALVES
    of_half = [tuple(range(half * number, half * (number + 1))) for number in range(HALVES)]

    def multiplied(some: tuple[int, ...], lower: bool) -> Callable[..., None]:
        """Of these steps all lower parts and then all middle ones, or the upper parts."""
        product, FIRST, COUNT = register_mma(DTYPE, y, some=2 * some if lower else some), some[0], len(some)

        @verb
        def multiply_parts(out, words, begun, smem_and_y):
            (smem, y_at), eight = smem_and_y, cuda.local.array(2 * WORDS, f32)
            for step in range(COUNT):
                columns.take(eight, begun, smem, FIRST + step)
                for word in range(WORDS):
                    at, one, other = WORDS * step + word, eight[2 * word], eight[2 * word + 1]
                    if lower:
                        one, other = below_any(one), below_any(other)
                        words[WORDS * COUNT + at] = packed_parts(one, other)
                        words[at] = packed_parts(below(one), below(other))
                    else:
                        words[at] = packed_parts(one, other)
            product.add(out, words, smem, y_at, 0 if lower and FIRST == 0 else 1)

        return multiply_parts

    lower, other_lower = (multiplied(some, True) for some in of_half)
    upper, other_upper = (multiplied(some, False) for some in of_half)
    let_go = mma.wait_but_one if overlapped else mma.wait

    @verb
    def room():
        words = mma.left()
        return mma.fragment(), words, mma.left() if overlapped else words

    @verb
    def add(state, room, smem, places, args, by):
        (out, words, other_words), begun, place = room, columns.begin(places[0], args), (smem, places[1])
        lower(out, words, begun, place)
        if not overlapped:
            mma.wait(out)
        other_lower(out, other_words, begun, place)
        let_go(out)
        begun = columns.begin(places[0], args)
        upper(out, words, begun, place)
        let_go(out)
        other_upper(out, other_words, begun, place)
        mma.wait(out)
        for e in range(mma.size):
            state[e] = state[e] * by + out[e]

    return members(locals(), size=mma.size, fragment=mma.fragment, fade=nothing(2))
