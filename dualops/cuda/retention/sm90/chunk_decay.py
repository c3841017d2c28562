"""The decay between two tokens of a chunk, and between a token and the state; the rounding errors of decayed scores.

    of a pair      gamma^(r - c), c <= r                 of passes that go back gamma^(c - r), c >= r
    of the state   gamma^(r + 1) for query r             gamma^(n - 1 - r), n being the tokens of the chunk
    to the state   gamma^(n - 1 - c) of token c          gamma^(c + 1)

The passes of `chunks` and `wide` call these verbs. `constant_decay` has a head's gamma. `per_token_decay` has each
step's decay, from the tables of `decay_tables`.

P is rounded to 16 bits for P @ V. With many tokens the errors of the scores average out below the rounding of o. A head
that forgets at once sees the last few tokens. Then each error counts: in one draw of five, o is off by more than twice
its own rounding. So `diagonal_residual` multiplies the errors of the 16 x 16 pairs of a warp's own tokens too. The warp
does so alone, because the products of a warpgroup have no registers left:

    o [16, Dv] += (P - rounded P) [16, 16] @ V [16, Dv]          mma.sync, V by ldmatrix from its boxes
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from ...compiler.backend import Members, Namespace, cuda, f32, i32, noun, u32, verb
from ...launch.views import number_type
from ...ptx.convert import pack_bf16x2, unpack_bf16x2
from ...ptx.ldmatrix import ldmatrix
from ...ptx.mma import mma_m16n8k16
from ...tile.epilogue import opaque_f32
from ...tile.numbers import numbers
from ...tile.products import anew_i32, opaque_i32
from ...tile.swizzle import Operand
from ..decays import decay
from .config import BOX, DTYPE
from .decay_tables import EIGHT, EIGHTS, ld_shared_v2_f32, load_float, tables_at
from .states import SPAN, column_of, my_column, my_row, rest, row_of

# log2 of a gamma; below it o needs `diagonal_residual`. Emulated without it, at 0.96 one draw of fifty is
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


@cache
def per_token_decay(width: int, at: int, back: bool) -> ChunkDecay:
    """The verbs for o of `width` columns. Tables begin at byte `at` of shared memory; back: tokens see those after
    them.
    """
    num, QUADS, LAST = numbers(f32), width // 8, 4 * (EIGHT - 1)
    WITHIN, NEAR, KEPT, KNOWN = tables_at(at)

    @verb
    def to_edge(smem, within_eight, of_eight):
        """Return the decay from a token to the edge of its eight that is after it; in passes back, before it."""
        return num.exp2(load_float(smem, i32(of_eight + LAST)) - within_eight) if back else num.exp2(within_eight)

    @verb
    def of(tables, call, h):
        return tables

    @verb
    def again(tables):
        return tables  # but see `my_thread`

    @verb
    def my_thread():
        """Return the thread's number. Registers keep nothing computed from it between chunks."""
        return anew_i32(i32(cuda.threadIdx.x))

    @verb
    def pairs(scores, row, mine, scale):
        (smem, eights), tid = mine, my_thread()
        line, column = i32(u32(row_of(tid)) % u32(EIGHT)), column_of(tid)
        first = i32(u32(row + row_of(tid)) // u32(EIGHT))  # the upper row's eight, the same for all lanes
        edge = cuda.local.array(2, f32)
        own = cuda.local.array(4, f32)  # for pairs of one eight
        between = cuda.local.array(2, f32)
        for h in range(2):
            of_eight = i32(WITHIN + 4 * EIGHT * i32(first + h))
            here = load_float(smem, i32(of_eight + 4 * line))
            there = ld_shared_v2_f32(smem, i32(of_eight + 4 * column))
            for e in range(2):
                between[e] = there[e] - here if back else here - there[e]
            for e in range(2):
                seen = column + e >= line if back else column + e <= line
                left = num.exp2(between[e]) * scale
                own[2 * h + e] = left if seen else num.zero
            edge[h] = to_edge(smem, here, of_eight) * scale
        for n in range(EIGHTS):
            j = n if back else EIGHTS - 1 - n
            if j >= first if back else j <= i32(first + 1):
                near = ld_shared_v2_f32(smem, i32(NEAR + 4 * EIGHT * j + 4 * column))
                across = load_float(eights, j)
                for h in range(2):
                    beyond = j > i32(first + h) if back else j < i32(first + h)
                    for e in range(2):
                        seen = beyond | ((j == i32(first + h)) & (column + e >= line if back else column + e <= line))
                        score = scores[4 * j + 2 * h + e] * (edge[h] * near[e] if beyond else own[2 * h + e])
                        scores[4 * j + 2 * h + e] = score if seen else num.zero
                    edge[h] = edge[h] * across if beyond else edge[h]
            else:
                for e in range(4):
                    scores[4 * j + e] = num.zero

    @verb
    def rows(o, row, count, mine, scale):
        r = i32(row + row_of(my_thread()))
        for h in range(2):
            factor = of_row(mine, i32(r + 8 * h), count) * scale
            for j in range(QUADS):
                for e in range(2):
                    o[4 * j + 2 * h + e] *= factor

    @verb
    def fade(mine, count):
        return load_float(mine[1], EIGHTS)

    @verb
    def weight(args, token):
        mine, _, scale = args
        kept = load_float(mine[0], i32(KEPT + 4 * token))
        return kept * scale if back else kept  # forth it is 1

    @verb
    def of_pair(mine, r, c):
        smem, eights = mine
        of_r, of_c = i32(u32(r) // u32(EIGHT)), i32(u32(c) // u32(EIGHT))
        here, there = load_float(smem, i32(WITHIN + 4 * r)), load_float(smem, i32(WITHIN + 4 * c))
        if of_r == of_c:
            return num.exp2(there - here if back else here - there)
        left = to_edge(smem, here, i32(WITHIN + 4 * EIGHT * of_r)) * load_float(smem, i32(NEAR + 4 * c))
        j, end = i32(min(of_r, of_c) + 1), max(of_r, of_c)
        while j < end:
            left *= load_float(eights, j)
            j = opaque_i32(j + 1)
        return left

    @verb
    def of_row(mine, r, count):
        return load_float(mine[0], i32(KNOWN + 4 * r))

    @verb
    def forgets(mine):
        return True  # any step may

    return ChunkDecay.from_locals(locals(), argument=number_type(DTYPE, 3))


# --- rounding errors --------------------------------------------------------------------------------

OWN = 16  # tokens of a warp
WORDS = 4  # of a thread, for 16 x 16 pairs


@cache
@noun
def diagonal_residual(v: Operand) -> Members:
    """The verbs for V in boxes of bfloat16, 16 tokens for each warp. Called by a warpgroup."""
    load, multiply, STEPS = ldmatrix(4, True), mma_m16n8k16("bf16"), v.lines // OWN

    @verb
    def _my_warp():
        """Return my warp's number among those that share V's tokens. Registers do not keep it between chunks."""
        return i32(u32(anew_i32(i32(cuda.threadIdx.x))) // u32(32) % u32(STEPS))

    @verb
    def words():
        """Return a local array for the errors."""
        return cuda.local.array(WORDS, u32)

    @verb
    def keep(words, scores):
        """Compute the errors of packing the scores of my warp's own tokens."""
        warp = _my_warp()
        for own in range(STEPS):
            if own == warp:
                for word in range(WORDS):
                    at = WORDS * own + word
                    low, high = unpack_bf16x2(pack_bf16x2(scores[2 * at], scores[2 * at + 1]))
                    words[word] = pack_bf16x2(rest(scores[2 * at] - low), rest(scores[2 * at + 1] - high))

    @verb
    def add(o, words, smem, v_at):
        """Add the product of the errors and V to o, after o's own products."""
        lane = i32(u32(anew_i32(i32(cuda.threadIdx.x))) % u32(32))
        line = v_at + (OWN * _my_warp() + lane % OWN) * SPAN
        right = cuda.local.array(WORDS, u32)
        for column in range(0, v.width, OWN):
            byte = 2 * (column % BOX) + lane // OWN * 16
            load(right, 0, smem, i32(line + column // BOX * v.box + (byte ^ (lane % 8) << 4)))
            multiply(o, column // 2, words, 0, right, 0)
            multiply(o, column // 2 + 4, words, 0, right, 2)

    return locals()
