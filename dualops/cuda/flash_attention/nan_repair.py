"""Recompute rows that are not finite, without tensor cores.

Tensor cores multiply masked elements too, and 0 * NaN is NaN. So a NaN or an infinity of an input may reach a row that
a mask hides it from. A warp recomputes such a row: one score after the other, and only of what the row sees.

    o:          p = exp(score - lse),  o += weight * p * v[j]                          for each key j that the row sees
    dq:         dS = p * (weight * do @ v[j] - delta) * slope,  dq += dS * k[j]
    dk and dv:  dk += dS * q[i],  dv += weight * p * do[i]       for each query i, of each head, that sees the key

A row of o is recomputed if the sum of its exponentials is finite; a row of dq unless it sees nothing, which makes it 0
even if a sink made lse NaN; a key's dk and dv always. Rows of large lse are NaN on purpose (`saved_lse`).
A score of -inf is left out, but not in a row that is NaN: all that such a row sees is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import Members, cuda, f32, i32, members, noun, verb
from ..launch.views import start
from ..tile.non_finite import non_finite_of
from ..tile.numbers import numbers
from ..tile.products import opaque_i32
from ..tile.rows import FULL_WARP, lane_reductions, shfl_idx_f32, shfl_idx_i32, vote_any
from ..tile.storage import storage
from ..tile.unrolled import nothing, unrolled
from .arguments import Variant
from .fragment_scores import LANES
from .options import OptionChain, pair_places
from .saved_lse import exponential
from .score_coords import my_column
from .tile_scheduler import Rows

HIDING_NOTHING = ("dropout", "sinks", "softcap", "alibi")
ERROR = 2.0**-20  # of a product on tensor cores, as a share of the sum of its terms' sizes


@noun
def _pairs(chain: OptionChain, variant: Variant) -> Members:
    """The verbs of a pair of a query and a key, by all lanes of a warp."""
    mem, num, lanes = storage(variant.dtype), numbers(f32), lane_reductions(f32, 32)
    D, Dv, SLACK = variant.D, variant.Dv, f32(ERROR)

    @verb
    def _product(x, x_row, y, y_row, width):
        total, size, d = num.zero, num.zero, i32(cuda.threadIdx.x % 32)
        while d < width:
            term = mem.load(x.data, x_row + d) * mem.load(y.data, y_row + d)
            total += term
            size += abs(term)
            d = opaque_i32(d + 32)
        return lanes.sum(total), lanes.sum(size) * SLACK

    @verb
    def score(x, q_row, k_row, at, work):
        """Return the scaled product, the score, and how far tensor cores' score may be from it."""
        found, error = _product(x.q, q_row, x.k, k_row, D)
        scaled, slack = found * work.scale, error * work.scale
        score = scaled
        if chain.bends:
            slack *= abs(chain.slope(scaled, work.options, at))
        if chain.scores:
            score = chain.score(scaled, work.options, at)
        return scaled, score, slack

    @verb
    def gradient(x, q_token, v_row, at, prob, scaled, options):
        """Return weight * prob and dS."""
        weighted = prob
        d_prob, _ = _product(x.do, start(x.do, at.b, at.h, q_token), x.v, v_row, Dv)
        if chain.weighs:
            weight = chain.weight(options, at)
            d_prob *= weight
            weighted *= weight
        d_score = prob * (d_prob - x.delta.data[start(x.delta, at.b, at.h, q_token)])
        if chain.bends:
            d_score *= chain.slope(scaled, options, at)
        return weighted, d_score

    return locals()


@noun
def warp_row(dtype: str, width: int, acc_size: int) -> Members:
    """The verbs of a row of acc [64, 2 * acc_size] of a warpgroup, for arrays of this width. acc_size is 0 if acc is
    another warpgroup's. own: a local array, in which a lane has columns lane, lane + 32, ...
    """
    mem, num, slots = storage(dtype), numbers(f32), acc_size // 16

    @verb
    def clear(own):
        for slot in range(slots):
            own[slot] = num.zero

    @unrolled(range(slots))
    def add(own, factor, x, place, slot):
        """Add a row of x. place: where it begins, and its first column."""
        column = i32(place[1] + 32 * slot + cuda.threadIdx.x % 32)
        if column < width:
            own[slot] += factor * mem.load(x, place[0] + column)

    @unrolled(range(slots))
    def put(acc, own, upper, lower, slot):
        """Write own to acc, if it is my upper row, or my lower one."""
        for j in range(4):
            for e in range(2):
                value = shfl_idx_f32(own[slot], i32(8 * j + my_column() + e), FULL_WARP)
                if upper:
                    acc[16 * slot + 4 * j + e] = value
                if lower:
                    acc[16 * slot + 4 * j + 2 + e] = value

    return members(
        locals(),
        slots=max(slots, 1),  # numbers of `own`
        zero_or_nan=non_finite_of(acc_size),  # (acc) -> for my upper row and my lower one: 0, or NaN if not finite
    )


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
    """The verb for acc [64, 2 * acc_size] of a warpgroup: o, or with `gradient` dq before it is scaled. It does nothing
    if no option hides a key from o.

    keys: the verb (task) -> first and end of the keys of all tiles. passes: whether tiles may extend beyond the end of
    a sequence.
    """
    num, pair_at, quad = numbers(f32), pair_places(f32), lane_reductions(f32, LANES)
    pair, of_row = _pairs(chain, variant), warp_row(variant.dtype, variant.D if gradient else variant.Dv, acc_size)
    SLOTS = of_row.slots

    if not gradient and not passes and all(option.name in HIDING_NOTHING for option, _ in variant.having.variants):
        return members(locals(), repair=nothing(7))

    @verb
    def _is_finite(x):
        return x - x == num.zero

    @verb
    def _share(x, task, at, prob, scaled, options):
        return prob * chain.weight(options, at) if chain.weighs else prob

    @verb
    def _gradient_share(x, task, at, prob, scaled, options):
        v_row = start(x.v, task.b, task.h_kv, task.k_first + at.j)
        _, d_score = pair.gradient(x, task.q_first + at.i, v_row, at, prob, scaled, options)
        return d_score

    share_of = _gradient_share if gradient else _share

    @verb
    def _recompute(own, row_lse, x, task, row, column, work):
        options, added = work.options, x.k if gradient else x.v
        i, h = queries.query(task, row), queries.head(task, row)
        q_row = start(x.q, task.b, h, task.q_first + i)
        first, end = chain.keys(options, i, i32(i + task.offset), task.Sk)
        of_row.clear(own)
        of_first, of_end = keys(task)
        j, end = max(i32(first), of_first), min(i32(end), of_end)
        while j < end:
            at = pair_at(task.b, h, i, j, task.offset)
            scaled, score, slack = pair.score(x, q_row, start(x.k, task.b, task.h_kv, task.k_first + j), at, work)
            nan_row = gradient and row_lse != row_lse
            if (score != num.minus_inf or nan_row) and chain.pick(options, at):
                share = share_of(x, task, at, exponential(score, row_lse, slack), scaled, options)
                of_row.add(own, share, added.data, (start(added, task.b, task.h_kv, task.k_first + j), column))
            j = opaque_i32(j + 1)

    @verb
    def _doubtful(total, row_lse):
        """Whether to recompute a row of mine. total: NaN if one of its numbers is not finite."""
        may_be_finite = row_lse != num.minus_inf if gradient else _is_finite(row_lse)
        return i32(not _is_finite(quad.sum(total)) and may_be_finite)

    @verb
    def repair(acc, lse, x, task, row, column, work):
        """Recompute rows of acc; by all lanes of a warp that has rows of it. lse: of my two rows. x: `Inputs` or
        `GradientInputs`. row: the warpgroup's first. column: the first of acc.
        """
        upper_total, lower_total = of_row.zero_or_nan(acc)
        lane, warp = i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x % 128 // 32)
        doubt = _doubtful(upper_total, lse[0]) + 2 * _doubtful(lower_total, lse[1])
        own = cuda.local.array(SLOTS, f32)
        r, end = i32(0), i32(16 * vote_any(doubt, FULL_WARP))
        while True:  # the condition is at the end: a loop that could be skipped made registers spill
            owner, this = i32(r % 8 * LANES), i32(row + 16 * warp + r)
            if shfl_idx_i32(doubt, owner, FULL_WARP) >> r // 8 & 1 and queries.there(task, this):
                above, below = shfl_idx_f32(lse[0], owner, FULL_WARP), shfl_idx_f32(lse[1], owner, FULL_WARP)
                row_lse = above if r < 8 else below
                mine = lane // LANES == r % 8
                _recompute(own, row_lse, x, task, this, column, work)
                of_row.put(acc, own, i32(mine and r < 8), i32(mine and r >= 8))
            r = opaque_i32(r + 1)
            if r >= end:
                break

    return locals()


@noun
def nan_repair_keys(chain: OptionChain, variant: Variant, dk_size: int, dv_size: int) -> Members:
    """The verb for accumulators of dk and dv of these sizes, 0 if they are another warpgroup's.

    It is always needed: an infinite q, say, makes a score -inf, which hides it.
    """
    num, pair_at, quad, pair = numbers(f32), pair_places(f32), lane_reductions(f32, LANES), _pairs(chain, variant)
    of_k, of_v = warp_row(variant.dtype, variant.D, dk_size), warp_row(variant.dtype, variant.Dv, dv_size)
    K_SLOTS, V_SLOTS = of_k.slots, of_v.slots

    @verb
    def _add_query(own_k, own_v, x, q_token, at, rows, work):
        q_row, do_row = start(x.q, at.b, at.h, q_token), start(x.do, at.b, at.h, q_token)
        scaled, score, slack = pair.score(x, q_row, rows[0], at, work)
        row_lse = x.lse.data[start(x.lse, at.b, at.h, q_token)]
        if (score != num.minus_inf or row_lse != row_lse) and chain.pick(work.options, at):
            prob = exponential(score, row_lse, slack)
            weighted, d_score = pair.gradient(x, q_token, rows[1], at, prob, scaled, work.options)
            of_k.add(own_k, d_score, x.q.data, (q_row, 0))
            of_v.add(own_v, weighted, x.do.data, (do_row, 0))

    @verb
    def _recompute(own_k, own_v, x, task, j, work):
        first, end = chain.queries(work.options, j, i32(j - task.offset), task.Sq)
        rows = start(x.k, task.b, task.h_kv, task.k_first + j), start(x.v, task.b, task.h_kv, task.k_first + j)
        of_k.clear(own_k)
        of_v.clear(own_v)
        h, group = i32(task.h_kv * work.extent.group), work.extent.group
        while h < i32((task.h_kv + 1) * group):
            i = i32(first)
            while i < end:
                _add_query(own_k, own_v, x, task.q_first + i, pair_at(task.b, h, i, j, task.offset), rows, work)
                i = opaque_i32(i + 1)
            h = opaque_i32(h + 1)

    @verb
    def _doubtful(total):
        return i32(quad.sum(total) != num.zero)  # a NaN is not 0

    @verb
    def repair(dk_acc, dv_acc, x, task, row, work):
        """Recompute rows of dk, before it is scaled, and of dv; by all lanes of a warp that has rows of them. x:
        `GradientInputs`. row: the warpgroup's first.
        """
        k_upper, k_lower = of_k.zero_or_nan(dk_acc)
        v_upper, v_lower = of_v.zero_or_nan(dv_acc)
        lane, warp = i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x % 128 // 32)
        doubt = _doubtful(k_upper + v_upper) + 2 * _doubtful(k_lower + v_lower)
        own_k, own_v = cuda.local.array(K_SLOTS, f32), cuda.local.array(V_SLOTS, f32)
        r, end = i32(0), i32(16 * vote_any(doubt, FULL_WARP))
        while True:  # the condition is at the end: a loop that could be skipped made registers spill
            j = i32(task.n0 + row + 16 * warp + r)
            if shfl_idx_i32(doubt, i32(r % 8 * LANES), FULL_WARP) >> r // 8 & 1 and j < task.Sk:
                mine = lane // LANES == r % 8
                _recompute(own_k, own_v, x, task, j, work)
                of_k.put(dk_acc, own_k, i32(mine and r < 8), i32(mine and r >= 8))
                of_v.put(dv_acc, own_v, i32(mine and r < 8), i32(mine and r >= 8))
            r = opaque_i32(r + 1)
            if r >= end:
                break

    return locals()
