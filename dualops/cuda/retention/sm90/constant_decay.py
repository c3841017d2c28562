"""The decay between two tokens of a chunk, and between a token and the state, with the gamma of a head.

    of a pair      gamma^(r - c), c <= r                 of passes that go back gamma^(c - r), c >= r
    of the state   gamma^(r + 1) for query r             gamma^(n - 1 - r), n being the tokens of the chunk
    to the state   gamma^(n - 1 - c) of token c          gamma^(c + 1)

The passes of `chunks` and `wide` call these verbs. `per_token_decay` has those for a decay of each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from ...compiler.backend import Namespace, f32, i32, verb
from ...launch.views import number_type
from ...tile.epilogue import opaque_f32
from ...tile.numbers import numbers
from ..arguments import decay
from .config import DTYPE
from .fragments import my_column, my_row

# log2 of a gamma; below it o needs `retention.diagonal_residual`. Emulated without it, at 0.96 one draw of fifty is
# beyond the accuracy rule; at 31 / 32, where RetNet's heads begin, one of a hundred, by 1.1 at most. RetNet's heads go
# without: the products of all heads took 12 % of the time (H200, 2026-11-26)
LEAST_KEPT = f32(math.log2(0.968))


class ChunkDecay(Namespace):
    """The verbs. mine: the result of `of` or `again`; row: the warpgroup's first one; r, c: tokens of the chunk, which
    has `count` tokens.
    """

    argument: Any  # the type of a kernel's argument `decay`
    of: Callable[..., Any]  # (decay or tables, call, h) -> mine
    again: Callable[..., Any]  # (mine) -> mine, but registers keep nothing computed from it between chunks
    pairs: Callable[..., None]  # (scores, row, mine, scale): a chunk's; 0 where a pair is not seen
    rows: Callable[..., None]  # (o, row, count, mine, scale): from the state to each row
    fade: Callable[..., Any]  # (mine, count): of the state, over the whole chunk
    weight: Callable[..., Any]  # ((mine, count, scale), token): to the state; 0 from token number count on
    of_pair: Callable[..., Any]  # (mine, r, c): of a pair that is seen
    of_row: Callable[..., Any]  # (mine, r, count): from the state to row r
    forgets: Callable[..., Any]  # (mine): so fast that the rounding errors of neighbouring tokens' scores count


@cache
def constant_decay(chunk: int, width: int, back: bool) -> ChunkDecay:
    """The verbs for chunks of `chunk` tokens and o of `width` columns. back: tokens see those after them."""
    num, own = numbers(f32), decay(DTYPE)
    power, QUADS, SCORE_QUADS = own.power, width // 8, chunk // 8

    @verb
    def of(gamma, call, h):
        return own.log2(gamma, call, h)

    @verb
    def again(log2_gamma):
        return opaque_f32(log2_gamma)  # or registers would keep all of its powers

    @verb
    def pairs(scores, row, log2_gamma, scale):
        """From a row's nearest pair on, because the factor falls by gamma^8 from quad to quad."""
        fade = power(log2_gamma, 8)
        for h in range(2):
            for e in range(2):
                first = i32(row + my_row() + 8 * h - my_column() - e)  # the distance to a column of quad 0
                factor = power(log2_gamma, i32((-first if back else first) & 7)) * scale
                for n in range(SCORE_QUADS):
                    j = n if back else SCORE_QUADS - 1 - n
                    seen = first <= 8 * j if back else first >= 8 * j
                    score = scores[4 * j + 2 * h + e] * factor
                    scores[4 * j + 2 * h + e] = score if seen else num.zero
                    factor = factor * fade if seen else factor

    @verb
    def rows(o, row, count, log2_gamma, scale):
        for h in range(2):
            r = i32(row + my_row() + 8 * h)
            factor = power(log2_gamma, max(i32(count - 1 - r), i32(0)) if back else i32(r + 1)) * scale
            for j in range(QUADS):
                for e in range(2):
                    o[4 * j + 2 * h + e] *= factor

    @verb
    def fade(log2_gamma, count):
        return power(log2_gamma, count)

    @verb
    def weight(args, token):
        log2_gamma, count, scale = args
        value = power(log2_gamma, i32(token + 1)) * scale if back else power(log2_gamma, i32(count - 1 - token))
        return value if token < count else num.zero

    @verb
    def of_pair(log2_gamma, r, c):
        return power(log2_gamma, i32(c - r) if back else i32(r - c))

    @verb
    def of_row(log2_gamma, r, count):
        return power(log2_gamma, i32(count - 1 - r) if back else i32(r + 1))

    @verb
    def forgets(log2_gamma):
        return log2_gamma < LEAST_KEPT

    return ChunkDecay.from_locals(locals(), argument=number_type(DTYPE, 1))
