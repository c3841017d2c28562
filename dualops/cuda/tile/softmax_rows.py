"""Online softmax of rows, one tile of scores after the other, on tensor-core accumulators, in base 2.

    rows.new_max(new_max, scores, row_max)                 two rows per thread, each shared by four lanes
    rows.exponents(base, factor, new_max, units)           the exponent of a score is score * factor - base
    rows.rescale_of(rescale, row_max, new_max, base, factor)   factor of the earlier sums and results
    rows.exp2(scores, base, factor)                        scores become probabilities
    rows.add(row_sum, scores, rescale)
    rows.scale(acc, rescale)
    rows.pack(probs, scores)                               as the left factor of the next product
    rows.close(row_max, row_sum, rescale, sink, units)     row_max becomes lse

A score may be any finite number. `score * factor - base` is one fma. Its error is the error of base, half an ulp. It is
the same for all scores of a row, so it cancels, except that P is rounded: `close` corrects the sum for the largest P.
But 2 ** error must not overflow. So `factor` is scale * log2(e) if the row's largest exponent is below LIMIT, else a
power of two, for which base is exact. In such a row, neighbouring floats are at least 8 apart as exponents (32, except
for float16). So a power of two instead of scale * log2(e) changes almost nothing.

A thread has rows r and r + 8 of accumulators [.., 8 * n], in quads: two neighbours of row r, then two of row r + 8
(`fragment.accumulator`). A row without keys so far has the maximum -inf; its exponents are relative to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..compiler.backend import Members, Noun, cuda, f32, i32, kept_noun, members, u32, verb
from ..ptx.arithmetic import (
    bits_of_f32,
    f32_of_bits,
    largest_unsigned_word as largest_unsigned_word,
    largest_word,
    mul_rn,
    settle as settle,
    settle_bits,
    smallest_word,
)
from ..ptx.convert import pack_bf16x2, pack_f16x2
from .numbers import LOG2_E, numbers
from .rows import FULL_WARP, lane_reductions, vote_any
from .split_bf16x3 import put_parts
from .storage import storage
from .unrolled import unrolled

ROWS = 2  # rows per thread
LANES = 4  # lanes that share a row
SIGN, EXPONENT_BITS, HALF = u32(1 << 31), u32(0x7F800000), f32(0.5)
LOG2, LN2 = f32(LOG2_E), f32(1 / LOG2_E)
# if all exponents are below this magnitude, a row's factor is scale * log2(e): P is at most 2 ** (half an ulp of LIMIT)
LIMITS = {"bfloat16": 2.0**30, "float32": 2.0**30, "float16": 2.0**28}
PAIRS = {"bfloat16": pack_bf16x2, "float16": pack_f16x2}


SoftmaxRows = Noun  # what `softmax_rows` makes


@cache
def pairs_of(dtype: str, words: int) -> Callable[..., None]:
    """Return the verb (packed, j, a, b): pack two numbers into word j of `words`; for "float32", one word for each
    part."""
    pack_two: Any = PAIRS.get(dtype)

    @verb
    def put(packed, j, a, b):
        packed[j] = pack_two(a, b)

    @verb
    def put_all_parts(packed, j, a, b):
        put_parts(packed, j, words, a, b)

    return put_all_parts if dtype == "float32" else put


@verb
def power_of_two(x, most):
    """Return the largest power of two up to x; half of it if it exceeds `most`."""
    power = f32_of_bits(u32(bits_of_f32(x) & EXPONENT_BITS))
    return power * HALF if power > most else power


@kept_noun
def softmax_rows(
    dtype: str, scores_size: int, acc_size: int, *, threes: bool = False, sinks: bool = False, rest: bool = False
) -> Members:
    """The verbs of online softmax, for the scores and results that a thread has.

    Probabilities are packed as "bfloat16" or "float16"; those of "float32" as three bfloat16 parts (`split_bf16x3`).

    sinks: `close` adds the sinks. rest: `close` keeps the rounding error of lse.

    threes: maxima are computed on the words of floats as integers, three at a time: one instruction on Hopper, so half
    as many are needed. Signed integers have the order of floats, except that negative floats have the opposite order.
    So if a thread has only negative scores in a row, the maximum is the smallest word.

    Unless exponents are large, a row's largest probability is exactly 1 in the product with V. It would be 1 to 3 %
    faster to rescale only after exponents have grown by 8. But if one key has most of the weight, its rounding then
    costs 2.4 times the baseline's error. If exponents are large, the largest probability is 2 ** (the error of base),
    and is rounded. `close` adds this rounding to the sum, so that the result of a row with one nonzero P is exact.

    row_max, new_max, row_sum and rescale are local arrays of two numbers.
    """
    num, lanes = numbers(f32), lane_reductions(f32, LANES)
    quads, acc_quads, put_pair = scores_size // 4, acc_size // 4, pairs_of(dtype, scores_size // 2)
    LIMIT, rounded = f32(LIMITS[dtype]), storage(dtype).rounded

    @verb
    def pair():
        """Return a local array of two numbers."""
        return cuda.local.array(ROWS, f32)

    @verb
    def start(row_max, row_sum):
        """Initialize rows, before their first keys."""
        for h in range(ROWS):
            row_max[h] = num.minus_inf
            row_sum[h] = num.zero

    @unrolled(range(ROWS))
    def _new_max(new_max, scores, row_max, h):
        most = num.maximum(scores[2 * h], scores[2 * h + 1])
        for j in range(1, quads):
            most = num.maximum(most, num.maximum(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]))
        new_max[h] = num.maximum(row_max[h], lanes.max(most))

    def extremes(word: Callable[..., Any], of_signed: bool) -> Callable[..., None]:
        @unrolled(range(ROWS))
        def extreme(most, scores, h):
            found = word(scores[2 * h], scores[2 * h + 1], scores[2 * h + 1])
            for j in range(1, quads):
                found = word(found, scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1])
            if not of_signed or bits_of_f32(most[h]) >= SIGN:
                most[h] = found

        return extreme

    largest, smallest = extremes(largest_word, False), extremes(smallest_word, True)

    @verb
    def _new_max_by_threes(new_max, scores, row_max):
        most = pair()
        largest(most, scores)
        bits = u32(0)
        for h in range(ROWS):
            bits |= bits_of_f32(most[h])
        if vote_any(i32(bits >= SIGN), FULL_WARP):
            smallest(most, scores)
        for h in range(ROWS):
            new_max[h] = num.maximum(row_max[h], lanes.max(most[h]))

    @verb
    def units(of_scores):
        """Return `units`: to_exponent, the power of two for large scores, the score from which it is used, to_score."""
        to_exponent, to_score = of_scores
        return to_exponent, power_of_two(to_exponent, max(to_score, num.one)), LIMIT / to_exponent, to_score

    @verb
    def _is_usual_score(most, units):
        return abs(most) < units[2]

    @verb
    def _is_usual_exponent(most, units):
        return abs(mul_rn(most, units[0])) < LIMIT

    is_usual = _is_usual_score if threes else _is_usual_exponent  # one more instruction, one register less

    @verb
    def exponents(base, factor, maxima, units):
        """Compute base and factor of exponents, for rows with these maxima."""
        for h in range(ROWS):
            most = num.base(maxima[h])
            factor[h] = units[0] if is_usual(most, units) else units[1]
            base[h] = mul_rn(most, factor[h])

    @verb
    def rescale_of(rescale, row_max, new_max, base, factor):
        """Compute the rescale factors; row_max becomes new_max."""
        for h in range(ROWS):
            rescale[h] = num.exp2(mul_rn(row_max[h], factor[h]) - base[h])
            row_max[h] = new_max[h]

    @unrolled(range(ROWS))
    def exp2(scores, base, factor, h):
        """Turn scores into probabilities."""
        for j in range(quads):
            scores[4 * j + 2 * h] = num.exp2(scores[4 * j + 2 * h] * factor[h] - base[h])
            scores[4 * j + 2 * h + 1] = num.exp2(scores[4 * j + 2 * h + 1] * factor[h] - base[h])

    @verb
    def settle(scores):
        """Make the compiler compute all scores before the next code, which may wait for products."""
        bits = bits_of_f32(scores[0])
        for e in range(1, scores_size):
            bits |= bits_of_f32(scores[e])
        settle_bits(bits)

    @unrolled(range(ROWS))
    def add(row_sum, scores, rescale, h):
        """Add to a lane's part of the sums."""
        total = scores[2 * h] + scores[2 * h + 1]
        for j in range(1, quads):
            total += scores[4 * j + 2 * h] + scores[4 * j + 2 * h + 1]
        row_sum[h] = row_sum[h] * rescale[h] + total

    @verb
    def _scale_row(acc, rescale, h):
        for j in range(acc_quads):
            acc[4 * j + 2 * h] *= rescale[h]
            acc[4 * j + 2 * h + 1] *= rescale[h]

    scale = unrolled(range(ROWS))(_scale_row)

    @unrolled(range(ROWS))
    def scale_changed(acc, rescale, h):
        """Rescale my warp's upper rows, or its lower ones, if one of them changes."""
        if vote_any(i32(rescale[h] != num.one), FULL_WARP):
            _scale_row(acc, rescale, h)

    @unrolled(range(ROWS))
    def divide(acc, row_sum, growth, h):
        """Multiply acc by growth and divide it by the totals; 0 for a row without keys."""
        seen = row_sum[h] != num.zero
        inverse = growth / row_sum[h] if seen else num.zero
        for j in range(acc_quads):
            acc[4 * j + 2 * h] = acc[4 * j + 2 * h] * inverse if seen else num.zero
            acc[4 * j + 2 * h + 1] = acc[4 * j + 2 * h + 1] * inverse if seen else num.zero

    @verb
    def pack(probs, scores):
        """Round the scores into probs, in pairs."""
        for j in range(2 * quads):
            put_pair(probs, j, scores[2 * j], scores[2 * j + 1])

    @verb
    def total(row_sum):
        """Add up row_sum over the lanes of a row."""
        for h in range(ROWS):
            row_sum[h] = lanes.sum(row_sum[h])

    @verb
    def close(row_max, row_sum, rescale, sink, units):
        """Turn row_max into lse, and row_sum into the divisor of acc.

        With sinks, the sink is added to row_sum, and rescale becomes acc's factor. With `rest`, rescale becomes the
        rounding error of lse.
        """
        base, factor = pair(), pair()
        exponents(base, factor, row_max, units)
        for h in range(ROWS):
            greatest = num.exp2(num.base(row_max[h]) * factor[h] - base[h])
            correction = rounded(greatest) - greatest
            # compute in exponents if row_max and sink are not large, else in scores
            fits = abs(num.base(row_max[h])) < units[2] and abs(num.base(sink)) * LOG2 < LIMIT
            most, to_exponent = mul_rn(row_max[h], units[0] if fits else units[3]), num.one if fits else LOG2
            if sinks:
                found, logit = most, mul_rn(sink, LOG2) if fits else sink
                most = num.maximum(found, logit)
                rescale[h] = num.exp2((found - num.base(most)) * to_exponent)
                row_sum[h] = row_sum[h] * rescale[h] + num.exp2((logit - num.base(most)) * to_exponent)
            most, log_sum = mul_rn(num.base(most), LN2 if fits else num.one), num.log2(row_sum[h]) * LN2
            row_max[h] = most + log_sum
            if rest:
                rescale[h] = most - row_max[h] + log_sum if row_max[h] != num.minus_inf else num.zero
            row_sum[h] += correction * rescale[h] if sinks else correction

    return members(
        locals(),
        new_max=_new_max_by_threes if threes else _new_max,  # (new_max, scores, row_max): in all lanes of a row
        scale=scale,  # (acc, rescale)
    )
