"""Rows that a NaN or an infinity of V may have reached though a mask hides its key.

Products of tensor cores leave nothing out: 0 * NaN is NaN. So a row of o that is not finite, though the sum of its
exponentials is, is made anew by its warp: score after score, and of V what the row sees. So is a row of dq whose lse is
large (`saved_lse`).

    p = exp(score - lse),  o += p * v[j]          for each key j that is seen

The same of dq, which K may have reached:

    dS = p * (weight * do @ v[j] - delta) * slope,  dq += dS * k[j]

which is 0 where nothing is seen, though a sink made lse NaN. There, something is left out always: an infinity of K can
make a score -inf, whose P is 0, and 0 times that infinity is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..compiler.backend import Members, cuda, f32, i32, members, noun, verb
from ..launch.views import start
from ..tile.non_finite import non_finite_of
from ..tile.numbers import numbers
from ..tile.products import opaque_i32
from ..tile.rows import FULL_WARP, lane_reductions, shfl_idx_f32, shfl_idx_i32, vote_any
from ..tile.storage import storage
from ..tile.unrolled import one_after_another
from .arguments import Variant
from .fragment_scores import LANES, my_column
from .options import OptionChain, pair_places
from .saved_lse import exponential
from .tile_scheduler import Rows

HIDING_NOTHING = ("dropout", "sinks", "softcap", "alibi")


@cache
def warp_product(dtype: str) -> Callable[..., Any]:
    """The verb (x, x_row, y, y_row, width) -> a row of x times one of y, and how far the same product on tensor cores
    may be from it; in all lanes of a warp.
    """
    mem, num, lanes, ERROR = storage(dtype), numbers(f32), lane_reductions(f32, 32), f32(2.0**-20)

    @verb
    def product(x, x_row, y, y_row, width):
        total, size, d = num.zero, num.zero, i32(cuda.threadIdx.x % 32)
        while d < width:
            term = mem.load(x.data, x_row + d) * mem.load(y.data, y_row + d)
            total += term
            size += abs(term)
            d = opaque_i32(d + 32)
        return lanes.sum(total), lanes.sum(size) * ERROR

    return product


@noun
def nan_repair(
    chain: OptionChain,
    variant: Variant,
    queries: Rows,
    keys: Callable[..., Any],
    acc_size: int,
    *,
    passes: bool,
    gradient: bool = False,
) -> Members:
    """The verb for acc [64, 2 * acc_size] of a warpgroup; it does nothing where no option hides a key from o.

    keys: the verb that says which keys a task's tiles have among them. passes: whether tiles pass the ends of
    sequences. gradient: acc is of dq, before it is scaled, instead of o. Called by all lanes of a warp that has rows of
    acc.
    """
    mem, num, pair_at, totals = storage(variant.dtype), numbers(f32), pair_places(f32), non_finite_of(acc_size)
    quad = lane_reductions(f32, LANES)
    D, Dv, slots = variant.D, variant.Dv, acc_size // 16  # columns of a lane: lane, lane + 32, ...
    WIDTH, ADDED = (D, 1) if gradient else (Dv, 2)  # of rows that are added up, and which of the arrays has them

    @verb
    def _nothing(acc, lse, arrays, task, row, column, scale, options):
        pass

    if not gradient and not passes and all(option.name in HIDING_NOTHING for option, _ in variant.having.variants):
        return members(locals(), repair=_nothing)

    @verb
    def _is_finite(x):
        return x - x == num.zero

    product = warp_product(variant.dtype)

    def add_slot(slot: int) -> Callable[..., None]:
        @verb
        def add(own, prob, v, place):
            first, column = place
            column = i32(column + 32 * slot + cuda.threadIdx.x % 32)
            if column < WIDTH:
                own[slot] += prob * mem.load(v, first + column)

        return add

    add = one_after_another([add_slot(slot) for slot in range(slots)])

    @verb
    def _share(prob, arrays, task, at, scaled, options):
        """What a key's row counts for, by its probability and its scaled product."""
        if chain.weighs:
            prob *= chain.weight(options, at)
        return prob

    @verb
    def _gradient_share(prob, arrays, task, at, scaled, options):
        do, delta = arrays[3], arrays[4]
        token = task.q_first + at.i
        v_row = start(arrays[2], task.b, task.h_kv, task.k_first + at.j)
        d_prob, _ = product(do, start(do, task.b, at.h, token), arrays[2], v_row, Dv)
        if chain.weighs:
            d_prob *= chain.weight(options, at)
        d_score = prob * (d_prob - delta.data[start(delta, task.b, at.h, token)])
        if chain.bends:
            d_score *= chain.slope(scaled, options, at)
        return d_score

    share_of = _gradient_share if gradient else _share

    @verb
    def _again(own, row_lse, arrays, task, row, column, scale, options):
        """One row, of which a lane has columns."""
        q, k, added = arrays[0], arrays[1], arrays[ADDED]
        i, h = queries.query(task, row), queries.head(task, row)
        q_row = start(q, task.b, h, task.q_first + i)
        first, end = chain.keys(options, i, i32(i + task.offset), task.Sk)
        for slot in range(slots):
            own[slot] = num.zero
        of_first, of_end = keys(task)
        j, end = max(i32(first), of_first), min(i32(end), of_end)
        while j < end:
            at = pair_at(task.b, h, i, j, task.offset)
            found, error = product(q, q_row, k, start(k, task.b, task.h_kv, task.k_first + j), D)
            scaled, slack = found * scale, error * scale
            score = scaled
            if chain.bends:
                slack *= abs(chain.slope(scaled, options, at))
            if chain.scores:
                score = chain.score(scaled, options, at)
            nan_row = gradient and row_lse != row_lse
            if (score != num.minus_inf or nan_row) and chain.pick(options, at):
                counts = share_of(exponential(score, row_lse, slack), arrays, task, at, scaled, options)
                add(own, counts, added.data, (start(added, task.b, task.h_kv, task.k_first + j), column))
            j = opaque_i32(j + 1)

    def put_slot(slot: int) -> Callable[..., None]:
        @verb
        def put(acc, own, upper, lower):
            for j in range(4):
                for e in range(2):
                    value = shfl_idx_f32(own[slot], i32(8 * j + my_column() + e), FULL_WARP)
                    if upper:
                        acc[16 * slot + 4 * j + e] = value
                    if lower:
                        acc[16 * slot + 4 * j + 2 + e] = value

        return put

    put = one_after_another([put_slot(slot) for slot in range(slots)])

    @verb
    def _doubtful(total, row_lse):
        """Whether a row of mine, of which `total` tells, is not finite though the sum of its exponentials is, or in a
        gradient whatever that is.
        """
        may_be_finite = row_lse != num.minus_inf if gradient else _is_finite(row_lse)
        return i32(not _is_finite(quad.sum(total)) and may_be_finite)

    @verb
    def repair(acc, lse, arrays, task, row, column, scale, options):
        """Repair rows of acc. lse: of my two rows. arrays: q, k and v, of a gradient do and delta too. row: the
        warpgroup's first. column: the first of acc.
        """
        upper_total, lower_total = totals(acc)
        upper_lse, lower_lse = lse
        lane, warp = i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x % 128 // 32)
        doubt = _doubtful(upper_total, upper_lse) + 2 * _doubtful(lower_total, lower_lse)
        own = cuda.local.array(slots, f32)
        r, end = i32(0), i32(16 * vote_any(doubt, FULL_WARP))
        while True:  # asked at its end: a loop that could be skipped made registers spill
            owner, this = i32(r % 8 * LANES), i32(row + 16 * warp + r)
            if shfl_idx_i32(doubt, owner, FULL_WARP) >> r // 8 & 1 and queries.there(task, this):
                above, below = shfl_idx_f32(upper_lse, owner, FULL_WARP), shfl_idx_f32(lower_lse, owner, FULL_WARP)
                row_lse = above if r < 8 else below
                mine = lane // LANES == r % 8
                _again(own, row_lse, arrays, task, this, column, scale, options)
                put(acc, own, i32(mine and r < 8), i32(mine and r >= 8))
            r = opaque_i32(r + 1)
            if r >= end:
                break

    return locals()
