"""Rows of dk and dv that a NaN or an infinity of Q, dO or V may have reached though a mask hides it.

Products of tensor cores leave nothing out: 0 * NaN is NaN. So a key whose row of dk or dv is not finite has both made
anew by its warp: score after score, and of Q and dO what sees the key. So has a key that a query of large lse sees
(`saved_lse`).

    p = exp(score - lse),  dv += weight * p * do[i]                for each query i that sees it, of each head
    dS = p * (weight * do[i] @ v - delta) * slope,  dk += dS * q[i]

A score of -inf is left out too, but not in a row that is NaN: all that such a row sees is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import Members, Namespace, cuda, f32, i32, noun, verb
from ..launch.views import start
from ..tile.non_finite import non_finite_of
from ..tile.numbers import numbers
from ..tile.products import opaque_i32
from ..tile.rows import FULL_WARP, lane_reductions, shfl_idx_f32, shfl_idx_i32, vote_any
from ..tile.storage import storage
from ..tile.unrolled import one_after_another
from .arguments import Variant
from .nan_repair import LANES, warp_product
from .options import OptionChain, pair_places
from .saved_lse import exponential
from .score_coords import my_column


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
    def _add_query(own_k, own_v, arrays, task, at, k_row, v_row, scale, options):
        q, k, v, do, lse, delta = arrays
        token = task.q_first + at.i
        q_row, do_row = start(q, at.b, at.h, token), start(do, at.b, at.h, token)
        found, error = product(q, q_row, k, k_row, D)
        scaled, slack = found * scale, error * scale
        score = scaled
        if chain.bends:
            slack *= abs(chain.slope(scaled, options, at))
        if chain.scores:
            score = chain.score(scaled, options, at)
        row_lse = lse.data[start(lse, at.b, at.h, token)]
        if (score != num.minus_inf or row_lse != row_lse) and chain.pick(options, at):  # all that a NaN row sees is NaN
            prob = exponential(score, row_lse, slack)
            d_prob, _ = product(do, do_row, v, v_row, Dv)
            weighted = prob
            if chain.weighs:
                weight = chain.weight(options, at)
                d_prob *= weight
                weighted *= weight
            d_score = prob * (d_prob - delta.data[start(delta, at.b, at.h, token)])
            if chain.bends:
                d_score *= chain.slope(scaled, options, at)
            of_k.add(own_k, d_score, q.data, q_row)
            of_v.add(own_v, weighted, do.data, do_row)

    @verb
    def _again(own_k, own_v, arrays, task, j, group, scale, options):
        """A key's row of dk and of dv, of which a lane has columns."""
        k, v = arrays[1], arrays[2]
        k_row = start(k, task.b, task.h_kv, task.k_first + j)
        v_row = start(v, task.b, task.h_kv, task.k_first + j)
        first, end = chain.queries(options, j, i32(j - task.offset), task.Sq)
        of_k.clear(own_k)
        of_v.clear(own_v)
        h = i32(task.h_kv * group)
        while h < i32((task.h_kv + 1) * group):
            i = i32(first)
            while i < end:
                at = pair_at(task.b, h, i, j, task.offset)
                _add_query(own_k, own_v, arrays, task, at, k_row, v_row, scale, options)
                i = opaque_i32(i + 1)
            h = opaque_i32(h + 1)

    K_SLOTS, V_SLOTS = of_k.slots, of_v.slots

    @verb
    def _doubtful(total):
        """Whether a row of mine, of whose numbers `total` tells, is not finite."""
        return i32(quad.sum(total) != num.zero)  # a NaN is not

    @verb
    def repair(dk_acc, dv_acc, arrays, task, row, group, scale, options):
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
                _again(own_k, own_v, arrays, task, j, group, scale, options)
                of_k.put(dk_acc, own_k, i32(mine and r < 8), i32(mine and r >= 8))
                of_v.put(dv_acc, own_v, i32(mine and r < 8), i32(mine and r >= 8))
            r = opaque_i32(r + 1)
            if r >= end:
                break

    return locals()
