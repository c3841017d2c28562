"""Sums of a chunk that log_decay's gradient needs, from float32 accumulators [64, columns] of each warpgroup.

    row_sums         of Y * o: each row's, or a number a warp
    product_sums     of one product times another, a number a warp

The order of a sum does not depend on the warps' timing.
"""

from __future__ import annotations

from functools import cache

from ...compiler.backend import Members, cuda, f32, i32, noun, u32, verb
from ...launch.views import start
from ...ptx.convert import unpack_bf16x2
from ...tile.a_fragment import words_of_rows
from ...tile.numbers import numbers
from ...tile.products import anew_i32
from ...tile.rows import lane_reductions
from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS, my_warpgroup
from .config import CHUNK, WARPS
from .states import my_row

LANES, WORDS = 4, 4  # of a row; of a thread, for 16 columns


@cache
@noun
def warp_sums() -> Members:
    """The verb that adds up a warp's numbers."""
    lanes = lane_reductions(f32, 32)

    @verb
    def put(to, x, place):
        """Write the sum of my warp's x. to: [B, H, chunks * WARPS]. place: batch, head, the chunk's first token."""
        (b, h, m0), tid = place, u32(anew_i32(i32(cuda.threadIdx.x)))
        total = lanes.sum(x)
        if tid % u32(32) == u32(0):
            to.data[start(to, b, h, i32(u32(m0) // u32(CHUNK) * u32(WARPS) + tid // u32(32)))] = total

    return locals()


@cache
@noun
def row_sums(y: Operand) -> Members:
    """The verbs for Y in boxes of bfloat16, whose rows and columns are those of the accumulators. Called by a
    warpgroup.
    """
    words_of, lanes, num, of_warp = words_of_rows(y), lane_reductions(f32, LANES), numbers(f32), warp_sums()
    steps = words_of.steps

    @verb
    def _multiply(sums, acc, smem, y_at, tid):
        """Compute my share of the sums of my two rows."""
        first, words = words_of.first(i32(y_at + my_warpgroup() * ROWS * y.span), tid), cuda.local.array(WORDS, u32)
        sums[0], sums[1] = num.zero, num.zero
        for step in range(steps):
            words_of.load(words, 0, smem, first, step)
            for word in range(WORDS):
                low, high = unpack_bf16x2(words[word])
                e = 2 * (WORDS * step + word)
                sums[word % 2] += acc[e] * low + acc[e + 1] * high

    @verb
    def put(to, acc, smem, y_at, place, count):
        """Write the sums of my rows. to: [B, H, S]. place: batch, head, the first token of the chunk, which has `count`
        tokens, and the warpgroup's first row.
        """
        (b, h, m0, row), tid, sums = place, anew_i32(i32(cuda.threadIdx.x)), cuda.local.array(2, f32)
        _multiply(sums, acc, smem, y_at, tid)
        for half in range(2):
            total, r = lanes.sum(sums[half]), i32(row + my_row() + 8 * half)
            if r < count and tid % LANES == 0:
                to.data[start(to, b, h, m0 + r)] = total

    @verb
    def put_total(to, acc, smem, y_at, place):
        """Write the sum of my warp's rows. to, place: as for `warp_sums`."""
        sums = cuda.local.array(2, f32)
        _multiply(sums, acc, smem, y_at, anew_i32(i32(cuda.threadIdx.x)))
        of_warp.put(to, sums[0] + sums[1], place)

    return locals()


@noun
def product_sums(size: int) -> Members:
    """The verb for `size` accumulators of a thread."""
    of_warp, num = warp_sums(), numbers(f32)

    @verb
    def put_total(to, acc, other, place):
        """Write the sum of my warp's products of two numbers. to, place: as for `warp_sums`."""
        total = num.zero
        for e in range(size):
            total += acc[e] * other[e]
        of_warp.put(to, total, place)

    return locals()
