"""A state that a block carries from chunk to chunk: rounded in shared memory as a right factor, and its update.

    acc [64, n] += (weights * X).T @ Y        X [tokens, 64 a warpgroup] and Y [tokens, n] tiles, the sum over tokens

    sums = weighted_sums(x, y, weight)            by a warpgroup, acc of its 64 columns of X
    sums.add(acc, smem, (x_at, y_at), args)       runs asynchronously until sums.wait(acc)
    carry = state_smem(tile, at)                  acc of all warpgroups, rounded, in shared memory
    carry.put(smem, acc)

X is loaded to registers transposed. There each token is multiplied by its weight and rounded to 16 bits.
`exact_products` keeps all digits of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import Members, Noun, cuda, f32, i32, members, noun, u32, verb
from ..ptx.convert import pack_bf16x2, unpack_bf16x2
from ..ptx.memory import ld_shared_b32
from ..tile.a_fragment import words_of_columns
from ..tile.epilogue import put_matrices
from ..tile.products import anew_i32
from ..tile.swizzle import Operand
from ..tile.unrolled import one_after_another
from ..tile.warpgroup import ROWS, my_warpgroup, register_mma

BOX = 64  # numbers of 16 bits in a line of a box
SPAN = 128  # bytes of it
DTYPE = "bfloat16"


@verb
def rest(less):
    """Return a rounding error; 0 if it is not finite."""
    return less if less == less else f32(0)


def times_transposed(x: Operand) -> Callable[..., None]:
    """Return the verb (sums, acc, smem, x_at), called by a warpgroup. For each of a thread's columns, which are tokens
    of X, it sums acc * X.T [64, tokens] over the thread's two rows.
    """
    columns = words_of_columns(x)
    steps = columns.steps

    @verb
    def multiply(sums, acc, smem, x_at):
        words, first = cuda.local.array(4, u32), columns.first(x_at, anew_i32(i32(cuda.threadIdx.x)))
        for step in range(steps):
            columns.load(words, 0, smem, first, step)
            for half in range(2):
                at = 2 * step + half
                upper, upper_next = unpack_bf16x2(words[2 * half])
                lower, lower_next = unpack_bf16x2(words[2 * half + 1])
                sums[2 * at] = acc[4 * at] * upper + acc[4 * at + 2] * lower
                sums[2 * at + 1] = acc[4 * at + 1] * upper_next + acc[4 * at + 3] * lower_next

    return multiply


WeightedSums = Noun  # the result of `weighted_sums`


@noun
def weighted_sums(x: Operand, y: Operand, weight: Callable[..., Any], *, alike: bool = False) -> Members:
    """The verbs for tiles of bfloat16: x in whole boxes, y "mn". weight(args, token): a verb that returns the float32
    factor of a token of the tile. alike: see `words_of_columns`.

    Called by all threads of a warpgroup.
    """
    mma, columns = register_mma(DTYPE, y), words_of_columns(x, alike=alike)
    steps = columns.steps

    @verb
    def add(acc, smem, places, args):
        """Add the product of X and Y to acc."""
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
        mma.add(acc, left, smem, places[1], 1)

    return members(
        locals(),
        size=mma.size,  # accumulators of a thread
        fragment=mma.fragment,  # () -> a local array for acc
        wait=mma.wait,  # (acc)
    )


@noun
def state_smem(tile: Operand, at: int, *, anew: bool = False) -> Members:
    """The verbs for a tile of bfloat16 at this byte, 64 lines of each warpgroup. `anew`: see `put_matrices`."""
    put, boxes, box_bytes, size = put_matrices(DTYPE, BOX, anew=anew), tile.width // BOX, tile.box, BOX // 2

    def put_box(box: int) -> Callable[..., None]:
        @verb
        def put_one(smem, place, acc, values):
            for e in range(size):
                values[e] = acc[box * size + e]
            put(smem, i32(place + box * box_bytes), values)

        return put_one

    put_all = one_after_another([put_box(box) for box in range(boxes)])

    @verb
    def put_to(smem, first, acc):
        """Write acc to 64 lines from this byte on. Same conditions as for `put`."""
        put_all(smem, first, acc, cuda.local.array(size, f32))

    @verb
    def put_(smem, acc):
        """Write acc to the tile. Called by a warpgroup when no product reads the old numbers; then a barrier comes
        before products that read the new ones.
        """
        put_to(smem, i32(at + my_warpgroup() * ROWS * SPAN), acc)

    @verb
    def number_in(smem, first, line, column):
        """Return a number of the tile that begins at this byte, as float32."""
        byte = i32(column % BOX * 2)
        place = i32(first + column // BOX * box_bytes + line * SPAN + ((byte & ~3) ^ (line & 7) << 4))
        low, high = unpack_bf16x2(ld_shared_b32(smem, place))
        return high if column % 2 == 1 else low

    @verb
    def number(smem, line, column):
        """Return a number of the tile, as float32."""
        return number_in(smem, at, line, column)

    return locals()
