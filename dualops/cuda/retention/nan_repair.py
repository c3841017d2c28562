"""Recomputes elements of a result that a NaN or an infinity of V may have reached from a column that is not seen.

Tensor cores multiply unseen pairs too, and 0 * NaN is NaN. So a thread recomputes an element that is not finite from
what its row sees, one number after another. The rows of a pass (`warp_repair`), until the sum is NaN:

    out_re = state_scale * what is left of the state * (q_r @ state[:, e] + term * norm_e)
             + sum over c that are seen of scale * (q_r . k_c + terms) * what is left of c * weight_c * v_ce

A chunk of a walk (`chunk_repair`), without V if the part from the state is not finite:

    o_re = scale * (gamma^(r + 1) * q_r @ state[:, e] + sum_(c <= r) gamma^(r - c) * (q_r . k_c) * v_ce)

Passes that go back sum over the tokens c >= r of the chunk. With log_decay the factors are those of `per_token_decay`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import cuda, f32, i32, i64, verb
from ..launch.views import start
from ..tile.non_finite import non_finite_of
from ..tile.numbers import numbers
from ..tile.products import opaque_f32, opaque_i32
from ..tile.storage import storage
from .arguments import OF_COLUMNS, Variant
from .decays import decays_of


@verb
def is_finite(x):
    return x - x == f32(0)


def row_product(dtype: str) -> Callable[..., Any]:
    """Return the verb (q, q_row, k, k_row, D) -> the product of two rows."""
    mem, ZERO = storage(dtype), f32(0)

    @verb
    def product(q, q_row, k, k_row, D):
        total, d = ZERO, i32(0)
        while d < D:
            total += mem.load(q.data, q_row + d) * mem.load(k.data, k_row + d)
            d = opaque_i32(d + 1)
        return total

    return product


def repair_with(size: int, place_of: Callable[..., Any], recomputed: Callable[..., Any]) -> Callable[..., None]:
    """Return the verb (acc, arrays, where, mine, call) for a result with `size` numbers a thread.

    Given verbs: place_of(where, element, call) -> row, column and whether the result has them; recomputed(arrays,
    where, row, column, mine, call) -> the element.
    """
    zero_or_nan = non_finite_of(size)

    @verb
    def take(value, acc, element):
        """Registers have fixed numbers: one at a time. Opaque values keep the compiler from indexing them."""
        for e in range(size):
            if opaque_i32(e) == element:
                value[0] = opaque_f32(acc[e])

    @verb
    def put(acc, element, value):
        for e in range(size):
            acc[e] = opaque_f32(value if e == element else acc[e])

    @verb
    def repair(acc, arrays, where, mine, call):
        upper, lower = zero_or_nan(acc)
        if not is_finite(upper + lower):
            one, element = cuda.local.array(1, f32), i32(0)
            while element < size:
                take(one, acc, element)
                value = one[0]
                row, column, there = place_of(where, element, call)
                if not is_finite(value) and there:
                    value = recomputed(arrays, where, row, column, mine, call)
                put(acc, element, value)
                element = opaque_i32(element + 1)

    return repair


def warp_repair(variant: Variant, size: int) -> Callable[..., None]:
    """Return the verb (acc, arrays, (place, n_first, slot, e), mine, call) for a result with `size` numbers a thread.
    Called by a warp.

    arrays: `Inputs` and `ChunkStates`. slot: of the state, below 0 for none. e: the thread's first column.
    """
    mem, num, product = storage(variant.dtype), numbers(f32), row_product(variant.dtype)
    decays = decays_of(variant.dtype, variant.stepwise)

    @verb
    def _place_of(where, element, call):
        place = where[0]
        m, e = place.m + element // 2 % 2 * 8, where[3] + element // 4 * 8 + element % 2
        return m, e, m < place.rows and e < call.Dv

    @verb
    def _of_state(arrays, where, element, q_row, row_term, mine, call):
        (x, (states, norms)), (place, n_first, slot, _), (m, e) = arrays, where, element
        total, d = num.zero, i32(0)
        first = slot * states.strides[0] + place.h * states.strides[1] + e
        while d < call.D:
            total += mem.load(x.q.data, q_row + d) * states.data[first + i64(d) * call.Dv]
            d = opaque_i32(d + 1)
        if variant.normalized and call.normed == OF_COLUMNS:
            one = row_term if call.row_term != 0 else num.one
            total += one * norms.data[slot * norms.strides[0] + place.h * norms.strides[1] + e]
        return total * (decays.between(mine, n_first, m + call.later) * call.state_scale)

    @verb
    def _recomputed(arrays, where, m, e, mine, call):
        q, k, v, weights, terms, _ = arrays[0]
        place, n_first, slot, _ = where
        b, h, total, row_term = place.b, place.h, num.zero, num.zero
        q_row = start(q, b, h, place.row0 + call.direction * m)
        if variant.normalized and call.row_term != 0:
            row_term = terms.data[start(terms, b, h, place.row0 + call.direction * m)]
        if slot >= 0:
            total = _of_state(arrays, where, (m, e), q_row, row_term, mine, call)
        c, end = i32(n_first), i32(min(i64(m + call.offset + 1), i64(place.columns)))
        while c < end and total == total:
            token = place.column0 + call.direction * c
            score = product(q, q_row, k, start(k, b, h, token), call.D) + row_term
            if variant.normalized and call.column_term != 0:
                score += terms.data[start(terms, b, h, token)]
            here, there = c + call.later, m + call.offset + call.later
            score *= decays.between(mine, here, there) * call.scale
            if variant.normalized and call.column_weighted != 0:
                score *= weights.data[start(weights, b, h, token)]
            total += score * mem.load(v.data, start(v, b, h, token) + e)
            c = opaque_i32(c + 1)
        return total

    return repair_with(size, _place_of, _recomputed)


def chunk_repair(
    dtype: str,
    of_state: Callable[..., Any],
    position: Callable[..., Any],
    size: int,
    chunk: int,
    back: bool,
    decay: Any,
) -> Callable[..., None]:
    """Return the verb (o, (x, room), where, mine, call) for o with `size` numbers a thread. where: batch, head, first
    token of the chunk, o's row and column. back: tokens see those after them. decay: as `constant_decay`.

    Given verbs: of_state(room, d, column): a number of the state, by o's own column; position(row, element) -> row and
    column of a thread's element. Called by a warpgroup, while shared memory still holds the state before the chunk.
    """
    mem, num, product = storage(dtype), numbers(f32), row_product(dtype)

    @verb
    def _place_of(where, element, call):
        r, column = position(where[3], element)
        return r, column, i32(where[2] + r) < call.rows and where[4] + column < call.Dv

    @verb
    def _recomputed(arrays, where, r, column, mine, call):
        (q, k, v, _, _, _), room = arrays
        b, h, m0, _, e0 = where
        q_row = start(q, b, h, m0 + r)
        total, d = num.zero, i32(0)
        while d < call.D:
            total += mem.load(q.data, q_row + d) * of_state(room, d, column)
            d = opaque_i32(d + 1)
        count = min(i32(call.rows - m0), i32(chunk))
        total *= decay.of_row(mine, r, count) * call.state_scale
        c, end = (r, count) if back else (i32(0), i32(r + 1))
        c = c if is_finite(total) else end
        while c < end:
            score = product(q, q_row, k, start(k, b, h, m0 + c), call.D) * call.scale
            total += score * decay.of_pair(mine, r, c) * mem.load(v.data, start(v, b, h, m0 + c) + e0 + column)
            c = opaque_i32(c + 1)
        return total

    return repair_with(size, _place_of, _recomputed)
