"""The decay between two tokens of a chunk, and between a token and the state, by each step's decay, from
`decay_tables`.

A thread's scores are quads, of two rows and two columns of an eight of tokens. Each row is in the same eight for all
lanes of its warp. So all lanes agree which quads are seen whole, and which one in part.
"""

from __future__ import annotations

from functools import cache

from ...compiler.backend import cuda, f32, i32, u32, verb
from ...launch.views import number_type
from ...tile.numbers import numbers
from ...tile.products import anew_i32, opaque_i32
from ..floats import ld_shared_v2_f32, load_float
from .config import DTYPE
from .constant_decay import ChunkDecay
from .decay_tables import EIGHT, EIGHTS, tables_at
from .fragments import column_of, row_of


@cache
def per_token_decay(width: int, at: int, back: bool, *, by_steps: bool = False) -> ChunkDecay:
    """The verbs for o of `width` columns. Tables begin at byte `at` of shared memory; back: tokens see those after
    them. by_steps: only `pairs` is called, with all digits of float32, not in passes back.
    """
    num, QUADS, LAST = numbers(f32), width // 8, 4 * (EIGHT - 1)
    WITHIN, NEAR, KEPT, KNOWN = tables_at(at)

    @verb
    def to_edge(smem, within_eight, of_eight):
        """Return the decay from a token to the edge of its eight that is behind it; in passes back, before it."""
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
    def left_of_steps(left, of_eight, smem, line, column):
        """Sum the logarithms from each of my two columns of an eight to a row of it."""
        for e in range(2):
            left[e] = num.zero
        for t in range(1, EIGHT):
            step = load_float(smem, i32(of_eight + (KEPT - WITHIN) + 4 * t))
            for e in range(2):
                left[e] += step if (column + e < t) & (t <= line) else num.zero

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
            if by_steps:
                left_of_steps(between, of_eight, smem, line, column)
            else:
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
