"""Recomputes elements of o that a NaN or an infinity of V may have reached from a token that the row does not see.

Tensor cores multiply unseen pairs too, and 0 * NaN is NaN. So if an element is not finite but its part from the state
is, its thread recomputes it from what the row sees:

    o_re = scale * (gamma^(r + 1) * q_r @ state[:, e] + sum_(c <= r) gamma^(r - c) * (q_r . k_c) * v_ce)

Passes that go back sum over the tokens c >= r of the chunk (`constant_decay`). With log_decay the factors are those of
`per_token_decay`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import Members, cuda, f32, i32, noun, verb
from ...launch.views import start
from ...tile.epilogue import opaque_f32
from ...tile.non_finite import non_finite_of
from ...tile.numbers import numbers
from ...tile.products import opaque_i32
from ...tile.storage import storage
from ...tile.unrolled import one_after_another
from .config import DTYPE
from .constant_decay import ChunkDecay
from .fragments import my_column, my_row


@noun
def hidden_elements(of_state: Callable[..., Any], size: int, chunk: int, back: bool, decay: ChunkDecay) -> Members:
    """The verb for o with `size` numbers a thread; back: tokens see those after them. of_state(room, d, column): a
    number of the state, by o's own column.

    Called by a warpgroup, while shared memory still holds the state before the chunk.
    """
    mem, num, doubts = storage(DTYPE), numbers(f32), non_finite_of(size)

    @verb
    def _is_finite(x):
        return x - x == num.zero

    @verb
    def _product(q, q_row, k, k_row, D):
        total, d = num.zero, i32(0)
        while d < D:
            total += mem.load(q.data, q_row + d) * mem.load(k.data, k_row + d)
            d = opaque_i32(d + 1)
        return total

    @verb
    def _anew(x, room, place, where, mine, call):
        """Return an element by its row and column; without V if its part from the state is not finite."""
        q, k, v, _, _, _ = x
        b, h, m0, _, e0 = where
        r, column = place
        q_row = start(q, b, h, m0 + r)
        total, d = num.zero, i32(0)
        while d < call.D:
            total += mem.load(q.data, q_row + d) * of_state(room, d, column)
            d = opaque_i32(d + 1)
        count = min(i32(call.rows - m0), i32(chunk))
        total *= decay.of_row(mine, r, count) * call.state_scale
        c, end = (r, count) if back else (i32(0), i32(r + 1))
        c = c if _is_finite(total) else end
        while c < end:
            score = _product(q, q_row, k, start(k, b, h, m0 + c), call.D) * call.scale
            total += score * decay.of_pair(mine, r, c) * mem.load(v.data, start(v, b, h, m0 + c) + e0 + column)
            c = opaque_i32(c + 1)
        return total

    def four(first: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """Registers have fixed numbers: four elements at a time. Opaque values keep the compiler from indexing them."""

        @verb
        def take_one(value, o, element, _):
            for e in range(first, first + 4):
                if e == element:
                    value[0] = opaque_f32(o[e])

        @verb
        def put_one(o, element, value, _):
            for e in range(first, first + 4):
                o[e] = opaque_f32(value if e == element else o[e])

        return take_one, put_one

    takes, puts = zip(*(four(first) for first in range(0, size, 4)))
    take, put = one_after_another(takes), one_after_another(puts)

    @verb
    def repair(o, x, room, where, mine, call):
        """Recompute hidden elements. where: batch, head, first token of the chunk, o's row and column."""
        upper, lower = doubts(o)
        if not _is_finite(upper + lower):
            one, element = cuda.local.array(1, f32), i32(0)
            while element < size:
                take(one, o, element, 0)
                value = one[0]
                r = i32(where[3] + my_row() + element // 2 % 2 * 8)
                column = i32(element // 4 * 8 + my_column() + element % 2)
                token = i32(where[2] + r)
                if not _is_finite(value) and token < call.rows and where[4] + column < call.Dv:
                    value = _anew(x, room, (r, column), where, mine, call)
                put(o, element, value, 0)
                element = opaque_i32(element + 1)

    return locals()
