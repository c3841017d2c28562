"""Rows that a NaN or an infinity of V may have reached though a mask hides its key.

Products of tensor cores leave nothing out: 0 * NaN is NaN. So a row of o that is not finite, though the sum of its
exponentials is, is made anew by its warp: score after score, and of V what the row sees. So is a row of dq whose lse is
large (`saved_lse`).

    p = exp(score - lse),  o += p * v[j]          for each key j that is seen

The same of dq, which K may have reached:

    dS = p * (weight * do @ v[j] - delta) * slope,  dq += dS * k[j]

which is 0 where nothing is seen, though a sink made lse NaN. There, something is left out always: an infinity of K can
make a score -inf, whose P is 0, and 0 times that infinity is NaN.

Rows of dk and dv that a NaN or an infinity of Q, dO or V may have reached though a mask hides it.

Products of tensor cores leave nothing out: 0 * NaN is NaN. So a key whose row of dk or dv is not finite has both made
anew by its warp: score after score, and of Q and dO what sees the key. So has a key that a query of large lse sees
(`saved_lse`).

    p = exp(score - lse),  dv += weight * p * do[i]                for each query i that sees it, of each head
    dS = p * (weight * do[i] @ v - delta) * slope,  dk += dS * q[i]

A score of -inf is left out too, but not in a row that is NaN: all that such a row sees is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..compiler.backend import Members, Namespace, cuda, f32, i32, members, noun, verb
from ..launch.views import start
from ..tile.non_finite import non_finite_of
from ..tile.numbers import numbers
from ..tile.products import opaque_i32
from ..tile.rows import FULL_WARP, lane_reductions, shfl_idx_f32, shfl_idx_i32, vote_any
from ..tile.storage import storage
from ..tile.unrolled import one_after_another
from .arguments import Variant
from .fragment_scores import LANES
from .options import OptionChain, pair_places
from .saved_lse import exponential
from .score_coords import my_column
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
    WIDTH = D if gradient else Dv  # of rows that are added up

    @verb
    def _nothing(acc, lse, x, task, row, column, work):
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
    def _share(prob, x, task, at, scaled, options):
        """What a key's row counts for, by its probability and its scaled product."""
        if chain.weighs:
            prob *= chain.weight(options, at)
        return prob

    @verb
    def _gradient_share(prob, x, task, at, scaled, options):
        token = task.q_first + at.i
        v_row = start(x.v, task.b, task.h_kv, task.k_first + at.j)
        d_prob, _ = product(x.do, start(x.do, task.b, at.h, token), x.v, v_row, Dv)
        if chain.weighs:
            d_prob *= chain.weight(options, at)
        d_score = prob * (d_prob - x.delta.data[start(x.delta, task.b, at.h, token)])
        if chain.bends:
            d_score *= chain.slope(scaled, options, at)
        return d_score

    share_of = _gradient_share if gradient else _share

    @verb
    def _again(own, row_lse, x, task, row, column, work):
        """One row, of which a lane has columns."""
        scale, options, added = work.scale, work.options, x.k if gradient else x.v
        i, h = queries.query(task, row), queries.head(task, row)
        q_row = start(x.q, task.b, h, task.q_first + i)
        first, end = chain.keys(options, i, i32(i + task.offset), task.Sk)
        for slot in range(slots):
            own[slot] = num.zero
        of_first, of_end = keys(task)
        j, end = max(i32(first), of_first), min(i32(end), of_end)
        while j < end:
            at = pair_at(task.b, h, i, j, task.offset)
            found, error = product(x.q, q_row, x.k, start(x.k, task.b, task.h_kv, task.k_first + j), D)
            scaled, slack = found * scale, error * scale
            score = scaled
            if chain.bends:
                slack *= abs(chain.slope(scaled, options, at))
            if chain.scores:
                score = chain.score(scaled, options, at)
            nan_row = gradient and row_lse != row_lse
            if (score != num.minus_inf or nan_row) and chain.pick(options, at):
                counts = share_of(exponential(score, row_lse, slack), x, task, at, scaled, options)
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
    def repair(acc, lse, x, task, row, column, work):
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
                _again(own, row_lse, x, task, this, column, work)
                put(acc, own, i32(mine and r < 8), i32(mine and r >= 8))
            r = opaque_i32(r + 1)
            if r >= end:
                break

    return locals()


class WarpRow(Namespace):
    """A row of accumulators whose columns lane, lane + 32, ... a lane has, in `slots` numbers."""

    slots: int
    clear: Callable[..., None]  # (own)
    add: Callable[..., None]  # (own, factor, x, first): the row of x that begins there
    put: Callable[..., None]  # (acc, own, upper, lower): where it is my upper row, or my lower one
    doubts: Callable[..., Any]  # (acc) -> of my upper row and my lower one, 0 or, if not finite, NaN


def warp_row(dtype: str, width: int, acc_size: int) -> WarpRow:
    """For acc [64, 2 * acc_size] of a warpgroup, of which so many columns are an array's. Of size 0 it is nobody's."""
    if not acc_size:
        return _nobodys()
    mem, num, slots = storage(dtype), numbers(f32), acc_size // 16

    @verb
    def clear(own):
        for slot in range(slots):
            own[slot] = num.zero

    def add_slot(slot: int) -> Callable[..., None]:
        @verb
        def add(own, factor, x, first):
            column = i32(32 * slot + cuda.threadIdx.x % 32)
            if column < width:
                own[slot] += factor * mem.load(x, first + column)

        return add

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

    add, put = (one_after_another([made(slot) for slot in range(slots)]) for made in (add_slot, put_slot))
    return WarpRow.from_locals(locals(), doubts=non_finite_of(acc_size))


def _nobodys() -> WarpRow:
    @verb
    def clear(own):
        pass

    @verb
    def add(own, factor, x, first):
        pass

    @verb
    def put(acc, own, upper, lower):
        pass

    @verb
    def doubts(acc):
        return f32(0), f32(0)

    return WarpRow.from_locals(locals(), slots=1)


@noun
def nan_repair_keys(chain: OptionChain, variant: Variant, dk_size: int, dv_size: int) -> Members:
    """The verb for so many accumulators, 0 of dk or dv where they are another warpgroup's.

    There is always something to hide: a score of -inf, of an infinite q say.

    Called by all lanes of a warp that has rows of dk and dv.
    """
    num, pair_at = numbers(f32), pair_places(f32)
    quad = lane_reductions(f32, LANES)
    D, Dv = variant.D, variant.Dv
    of_k, of_v = warp_row(variant.dtype, D, dk_size), warp_row(variant.dtype, Dv, dv_size)

    product = warp_product(variant.dtype)

    @verb
    def _add_query(own_k, own_v, x, task, at, work):
        scale, options = work.scale, work.options
        q_token, k_token = task.q_first + at.i, task.k_first + at.j
        q_row, do_row = start(x.q, at.b, at.h, q_token), start(x.do, at.b, at.h, q_token)
        found, error = product(x.q, q_row, x.k, start(x.k, at.b, task.h_kv, k_token), D)
        scaled, slack = found * scale, error * scale
        score = scaled
        if chain.bends:
            slack *= abs(chain.slope(scaled, options, at))
        if chain.scores:
            score = chain.score(scaled, options, at)
        row_lse = x.lse.data[start(x.lse, at.b, at.h, q_token)]
        if (score != num.minus_inf or row_lse != row_lse) and chain.pick(options, at):  # all that a NaN row sees is NaN
            prob = exponential(score, row_lse, slack)
            d_prob, _ = product(x.do, do_row, x.v, start(x.v, at.b, task.h_kv, k_token), Dv)
            weighted = prob
            if chain.weighs:
                weight = chain.weight(options, at)
                d_prob *= weight
                weighted *= weight
            d_score = prob * (d_prob - x.delta.data[start(x.delta, at.b, at.h, q_token)])
            if chain.bends:
                d_score *= chain.slope(scaled, options, at)
            of_k.add(own_k, d_score, x.q.data, q_row)
            of_v.add(own_v, weighted, x.do.data, do_row)

    @verb
    def _again(own_k, own_v, x, task, j, group, work):
        """A key's row of dk and of dv, of which a lane has columns."""
        first, end = chain.queries(work.options, j, i32(j - task.offset), task.Sq)
        of_k.clear(own_k)
        of_v.clear(own_v)
        h = i32(task.h_kv * group)
        while h < i32((task.h_kv + 1) * group):
            i = i32(first)
            while i < end:
                at = pair_at(task.b, h, i, j, task.offset)
                _add_query(own_k, own_v, x, task, at, work)
                i = opaque_i32(i + 1)
            h = opaque_i32(h + 1)

    K_SLOTS, V_SLOTS = of_k.slots, of_v.slots

    @verb
    def _doubtful(total):
        """Whether a row of mine, of whose numbers `total` tells, is not finite."""
        return i32(quad.sum(total) != num.zero)  # a NaN is not

    @verb
    def repair(dk_acc, dv_acc, x, task, row, group, work):
        """Repair rows of dk, which is not scaled yet, and of dv. arrays: q, k, v, do, lse and delta. row: the
        warpgroup's first.
        """
        k_upper, k_lower = of_k.doubts(dk_acc)
        v_upper, v_lower = of_v.doubts(dv_acc)
        lane, warp = i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x % 128 // 32)
        doubt = _doubtful(k_upper + v_upper) + 2 * _doubtful(k_lower + v_lower)
        own_k, own_v = cuda.local.array(K_SLOTS, f32), cuda.local.array(V_SLOTS, f32)
        r, end = i32(0), i32(16 * vote_any(doubt, FULL_WARP))
        while True:  # asked at its end: a loop that could be skipped made registers spill
            j = i32(task.n0 + row + 16 * warp + r)
            if shfl_idx_i32(doubt, i32(r % 8 * LANES), FULL_WARP) >> r // 8 & 1 and j < task.Sk:
                mine = lane // LANES == r % 8
                _again(own_k, own_v, x, task, j, group, work)
                of_k.put(dk_acc, own_k, i32(mine and r < 8), i32(mine and r >= 8))
                of_v.put(dv_acc, own_v, i32(mine and r < 8), i32(mine and r >= 8))
            r = opaque_i32(r + 1)
            if r >= end:
                break

    return locals()
