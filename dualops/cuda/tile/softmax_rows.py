"""The softmax of rows that come a tile of scores after the other, on accumulators of tensor cores, in base 2.

    rows.new_max(new_max, scores, row_max)                 two rows a thread, each shared by four lanes
    rows.rescale_of(rescale, row_max, new_max, multiplier) what sums and results so far are to be multiplied by
    rows.exp2(scores, row_max, multiplier)                 scores become probabilities
    rows.add(row_sum, scores, rescale)
    rows.scale(acc, rescale)
    rows.pack(probs, scores)                               as the left factor of the next product

A score times `multiplier` is an exponent. Of accumulators [.., 8 * n] a thread has rows r and r + 8, in quads of two
neighbours of the one and two of the other (`fragment.accumulator`). A row that has seen nothing has the maximum -inf
and counts from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, cuda, f32, i32, u32, verb
from ..ptx.arithmetic import (
    bits_of_f32,
    largest_unsigned_word as largest_unsigned_word,
    largest_word,
    settle as settle,
    settle_bits,
    smallest_word,
)
from ..ptx.convert import pack_bf16x2, pack_f16x2
from .numbers import numbers
from .rows import FULL_WARP, lane_reductions, vote_any
from .thirds import put_parts
from .unrolled import one_after_another

ROWS = 2  # of a thread
LANES = 4  # that share a row
SIGN = u32(1 << 31)
PAIRS = {"bfloat16": pack_bf16x2, "float16": pack_f16x2}


class SoftmaxRows(Namespace):
    """The verbs; row_max, new_max, row_sum and rescale are local arrays of two numbers."""

    pair: Callable[..., Any]  # () -> such an array
    # (row_max, row_sum, first, share): rows begin with a logit without a value, or -inf, and this lane's share of its 1
    start: Callable[..., None]
    new_max: Callable[..., None]  # (new_max, scores, row_max): in all lanes of a row
    rescale_of: Callable[..., None]  # (rescale, row_max, new_max, multiplier): and row_max becomes new_max
    exp2: Callable[..., None]  # (scores, row_max, multiplier)
    exp2_from: Callable[..., None]  # (scores, base, multiplier): of exponents less those of the rows, in base
    settle: Callable[..., None]  # (scores): all are known before what comes next, which may be a wait for products
    add: Callable[..., None]  # (row_sum, scores, rescale): a lane's share of the sums
    scale: Callable[..., None]  # (acc, rescale)
    scale_changed: Callable[..., None]  # (acc, rescale): my warp's upper rows, or lower, if one changes
    pack: Callable[..., None]  # (probs, scores): rounded, in pairs
    total: Callable[..., None]  # (row_sum): the lanes meet
    # (row_max, row_sum, rescale, logit, multiplier): a logit without a value joins rows whose lanes have met
    join: Callable[..., None]
    divide: Callable[..., None]  # (acc, row_sum, growth): by the totals, times this; 0 where a row has seen nothing
    # (row_max, row_sum, multiplier): row_max becomes the logarithm to base 2 of the sum of exponentials
    log2: Callable[..., None]


@cache
def pairs_of(dtype: str, words: int) -> Callable[..., None]:
    """The verb (packed, j, a, b): two numbers to word j of so many; of "float32", to one of so many for each part."""
    pack_two: Any = PAIRS.get(dtype)

    @verb
    def put(packed, j, a, b):
        packed[j] = pack_two(a, b)

    @verb
    def put_all_parts(packed, j, a, b):
        put_parts(packed, j, words, a, b)

    return put_all_parts if dtype == "float32" else put


def _each(of_row: Callable[[int], Callable[..., None]], rows: int) -> Callable[..., None]:
    """A verb of three arguments for one row after the other: a loop over them would be too long to be unrolled."""

    def of_four(row: int) -> Callable[..., None]:
        one = of_row(row)

        @verb
        def four(a, b, c, _):
            one(a, b, c)

        return four

    every = one_after_another([of_four(row) for row in range(rows)])

    @verb
    def each(a, b, c):
        every(a, b, c, 0)

    return each


@cache
def softmax_rows(dtype: str, scores_size: int, acc_size: int, strips: int = 1, *, threes: bool = False) -> SoftmaxRows:
    """For so many scores and results of a thread, and as many again for each strip of rows; probabilities are packed as
    "bfloat16" or "float16", or those of "float32" as three parts of bfloat16 each (`thirds`).

    threes: maxima are those of words, three at a time, which Hopper does in one instruction, and half as many are
    needed. Signed integers are in the order of floats, but for those with a sign, whose order is the opposite: where a
    thread has no others of a row, its greatest is the smallest word.

    A row's greatest probability is 1 when it meets V, exactly. Not rescaling as long as exponents have grown by less
    than 8 is 1 to 3 % faster, and where one key counts for most costs its rounding: 2.4 times the baseline's error.
    """
    num, lanes = numbers(f32), lane_reductions(f32, LANES)
    quads, acc_quads, put_pair = scores_size // 4, acc_size // 4, pairs_of(dtype, scores_size // 2)
    ROWS_THERE = ROWS * strips

    def each(of_row: Callable[[int], Callable[..., None]]) -> Callable[..., None]:
        return _each(of_row, ROWS_THERE)

    def first_of(h: int, size: int) -> int:
        """Where the row's first two numbers are."""
        return h // ROWS * size + h % ROWS * 2

    @verb
    def pair():
        return cuda.local.array(ROWS_THERE, f32)

    @verb
    def start(row_max, row_sum, first, share):
        for h in range(ROWS_THERE):
            row_max[h] = first
            row_sum[h] = share

    def new_max_of(h: int) -> Callable[..., None]:
        FIRST = first_of(h, scores_size)

        @verb
        def new_max(new_max, scores, row_max):
            most = num.maximum(scores[FIRST], scores[FIRST + 1])
            for j in range(1, quads):
                most = num.maximum(most, num.maximum(scores[FIRST + 4 * j], scores[FIRST + 4 * j + 1]))
            new_max[h] = num.maximum(row_max[h], lanes.max(most))

        return new_max

    def extreme_of(h: int, word: Callable[..., Any], of_signed: bool) -> Callable[..., None]:
        FIRST = first_of(h, scores_size)

        @verb
        def extreme(most, scores, _):
            found = word(scores[FIRST], scores[FIRST + 1], scores[FIRST + 1])
            for j in range(1, quads):
                found = word(found, scores[FIRST + 4 * j], scores[FIRST + 4 * j + 1])
            if not of_signed or bits_of_f32(most[h]) >= SIGN:
                most[h] = found

        return extreme

    largest_each = each(lambda h: extreme_of(h, largest_word, False))
    smallest_each = each(lambda h: extreme_of(h, smallest_word, True))

    @verb
    def new_max_by_threes(new_max, scores, row_max):
        most = pair()
        largest_each(most, scores, 0)
        bits = u32(0)
        for h in range(ROWS_THERE):
            bits |= bits_of_f32(most[h])
        if vote_any(i32(bits >= SIGN), FULL_WARP):
            smallest_each(most, scores, 0)
        for h in range(ROWS_THERE):
            new_max[h] = num.maximum(row_max[h], lanes.max(most[h]))

    @verb
    def rescale_of(rescale, row_max, new_max, multiplier):
        for h in range(ROWS_THERE):
            rescale[h] = num.exp2((row_max[h] - num.base(new_max[h])) * multiplier)
            row_max[h] = new_max[h]

    def exp2_less(h: int) -> Callable[..., None]:
        FIRST = first_of(h, scores_size)

        @verb
        def exp2(scores, base, multiplier):
            for j in range(quads):
                scores[FIRST + 4 * j] = num.exp2(scores[FIRST + 4 * j] * multiplier - base)
                scores[FIRST + 4 * j + 1] = num.exp2(scores[FIRST + 4 * j + 1] * multiplier - base)

        return exp2

    def exp2_of(h: int) -> Callable[..., None]:
        less = exp2_less(h)

        @verb
        def exp2(scores, row_max, multiplier):
            less(scores, num.base(row_max[h]) * multiplier, multiplier)

        return exp2

    def exp2_from_of(h: int) -> Callable[..., None]:
        less = exp2_less(h)

        @verb
        def exp2_from(scores, base, multiplier):
            less(scores, base[h], multiplier)

        return exp2_from

    @verb
    def settle_all(scores):
        bits = bits_of_f32(scores[0])
        for e in range(1, scores_size * strips):
            bits |= bits_of_f32(scores[e])
        settle_bits(bits)

    def add_of(h: int) -> Callable[..., None]:
        FIRST = first_of(h, scores_size)

        @verb
        def add(row_sum, scores, rescale):
            total = scores[FIRST] + scores[FIRST + 1]
            for j in range(1, quads):
                total += scores[FIRST + 4 * j] + scores[FIRST + 4 * j + 1]
            row_sum[h] = row_sum[h] * rescale[h] + total

        return add

    def scale_of(h: int) -> Callable[..., None]:
        FIRST = first_of(h, acc_size)

        @verb
        def scale(acc, rescale, _):
            for j in range(acc_quads):
                acc[FIRST + 4 * j] *= rescale[h]
                acc[FIRST + 4 * j + 1] *= rescale[h]

        return scale

    def divide_of(h: int) -> Callable[..., None]:
        FIRST = first_of(h, acc_size)

        @verb
        def divide(acc, row_sum, growth):
            seen = row_sum[h] != num.zero
            inverse = growth / row_sum[h] if seen else num.zero
            for j in range(acc_quads):
                acc[FIRST + 4 * j] = acc[FIRST + 4 * j] * inverse if seen else num.zero
                acc[FIRST + 4 * j + 1] = acc[FIRST + 4 * j + 1] * inverse if seen else num.zero

        return divide

    def scale_changed_of(h: int) -> Callable[..., None]:
        of_row = scale_of(h)

        @verb
        def scale_changed(acc, rescale, _):
            if vote_any(i32(rescale[h] != num.one), FULL_WARP):
                of_row(acc, rescale, 0)

        return scale_changed

    scale_each, scale_each_changed, divide_each = each(scale_of), each(scale_changed_of), each(divide_of)

    @verb
    def scale(acc, rescale):
        scale_each(acc, rescale, 0)

    @verb
    def scale_changed(acc, rescale):
        scale_each_changed(acc, rescale, 0)

    @verb
    def divide(acc, row_sum, growth):
        divide_each(acc, row_sum, growth)

    @verb
    def pack(probs, scores):
        for j in range(2 * quads):  # of one strip
            put_pair(probs, j, scores[2 * j], scores[2 * j + 1])

    @verb
    def total(row_sum):
        for h in range(ROWS_THERE):
            row_sum[h] = lanes.sum(row_sum[h])

    @verb
    def join(row_max, row_sum, rescale, logit, multiplier):
        new_max = pair()
        for h in range(ROWS_THERE):
            new_max[h] = num.maximum(row_max[h], logit)
        rescale_of(rescale, row_max, new_max, multiplier)
        for h in range(ROWS_THERE):
            share = num.exp2((logit - num.base(row_max[h])) * multiplier)
            row_sum[h] = row_sum[h] * rescale[h] + share

    @verb
    def log2_of(row_max, row_sum, multiplier):
        for h in range(ROWS_THERE):
            row_max[h] = num.base(row_max[h]) * multiplier + num.log2(row_sum[h])

    return SoftmaxRows(
        pair=pair,
        start=start,
        new_max=new_max_by_threes if threes else each(new_max_of),
        rescale_of=rescale_of,
        exp2=each(exp2_of),
        exp2_from=each(exp2_from_of),
        settle=settle_all,
        add=each(add_of),
        scale=scale,
        scale_changed=scale_changed,
        pack=pack,
        total=total,
        join=join,
        divide=divide,
        log2=log2_of,
    )
