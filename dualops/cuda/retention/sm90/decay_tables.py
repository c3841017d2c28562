"""Tables of a chunk for the decay between two of its tokens, by the decay of each step.

L_n is the sum of the first n of a chunk's logarithms, to base 2. A pair r >= c has the decay 2^(L_(r + 1) - L_(c + 1)).
An exponential for every pair would be too slow. So the decay of a pair in different eights of tokens is a product:

    from c to the end of its eight . each eight between them . from the beginning of r's eight to r

None of these is above 1, and all are computed once per chunk. A lane of the producer warpgroup has four tokens. It
sums them up, with its neighbour's and with those of the lanes before and after, and writes for the consumers

    within    the logarithm of the decay from the beginning of its eight to a token: a pair of one eight needs their
              difference, a thread needs two for each of its two rows
    near      from a token to the edge of its eight that is nearer to the row
    kept      from a token to the next state; 0 beyond the tokens
    known     from the previous state to a token
    eights    of each eight, and of the chunk: this one with one rounding near 1, as each chunk multiplies a state by it

The numbers of a sum have one sign, so each sum is as exact as a float32. Only differences within an eight are
subtracted. There a step that forgets nearly all would make the steps after it lose precision. That error is below o's
rounding. In passes that go back a token sees those after it: the sums are the same, with the ends exchanged.

Shared memory: 16 bytes per token, and 4 per eight.

The noun also has the barriers between the warp that computes the tables and the consumers:

    the warp, of a chunk            consumers
    put(...)                        wait(barriers, i);  ...;  release(barriers, i)

There is one buffer. The tables of a chunk are written when all consumers have read those of the previous chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ...compiler.backend import Members, cuda, f32, i32, members, noun, u32, verb
from ...launch.views import start
from ...ptx.arithmetic import bits_of_f32, f32_of_bits
from ...ptx.memory import (
    ld_shared_b32,
    ld_shared_v2_f32 as ld_shared_v2_f32,
    st_shared_v4_b32,
)
from ...tile.epilogue import opaque_f32
from ...tile.numbers import LOG2_E, numbers
from ...tile.pipeline import pipeline
from ...tile.products import anew_i32
from ...tile.rows import FULL_WARP, shfl_idx_f32
from ...tile.second_barrier import second_barrier
from ..decays import exp_of_step
from .config import CHUNK, DECAY_TABLES, DTYPE


@verb
def load_float(array, at):
    return f32_of_bits(ld_shared_b32(array, at))


@verb
def store_four_floats(array, at, four):
    a, b, c, d = bits_of_f32(four[0]), bits_of_f32(four[1]), bits_of_f32(four[2]), bits_of_f32(four[3])
    st_shared_v4_b32(array, at, a, b, c, d)


EIGHT = 8  # tokens
EIGHTS = CHUNK // EIGHT
EACH = CHUNK // 32  # tokens of a lane
LEAST = -128.0  # of a step: the decay is 0 in float32


class TablesAt(NamedTuple):
    """Where in shared memory the tables of tokens begin, in bytes."""

    within: int
    near: int
    kept: int
    known: int


def tables_at(at: int) -> TablesAt:
    """Return where the tables begin, the first one at byte `at`."""
    return TablesAt(*(at + n * DECAY_TABLES // 4 for n in range(4)))


@cache
@noun
def decay_tables(at: int, back: bool, warps: int) -> Members:
    """The verbs for tables from byte `at` on, read by `warps` warps. back: tokens see those after them. `i` numbers the
    chunks of a block. tables: shared memory, and the array of the eights in it.
    """
    pipe, written = pipeline(1, 0, warps), second_barrier(1, 0)
    num, LOG2, SMALLEST, place_of = numbers(f32), f32(LOG2_E), f32(LEAST), tables_at(at)
    exp_of, LOG_2 = exp_of_step(DTYPE), f32(1 / LOG2_E)

    @verb
    def eights():
        """Return the array of the eights; once in a kernel, by all threads."""
        return cuda.shared.array(EIGHTS + 1, f32)

    @verb
    def own():
        """Return a local array for the logarithms that a lane has loaded."""
        return cuda.local.array(EACH, f32)

    @verb
    def _lane_again():
        """Return the lane. Registers keep nothing computed from it between chunks: a producer has few."""
        return i32(u32(anew_i32(i32(cuda.threadIdx.x))) % u32(32))

    @verb
    def _fetch(own, logs, b, h, m0, rows):
        """Start to load the logarithms of the chunk that begins with token m0."""
        t = i32(m0 + EACH * _lane_again())
        for n in range(EACH):
            own[n] = num.zero
            if t + n < rows:
                x = logs.data[start(logs, b, h, t + n)] * LOG2
                own[n] = x if x > SMALLEST else SMALLEST

    @verb
    def _sums(x, lane, way):
        """Return the sum of the eights before a lane's (way -1) or after it (way 1), and of them and its own."""
        total = x
        for step in range(4):
            there = i32(lane + way * (2 << step))
            other = shfl_idx_f32(total, i32(there & 31), FULL_WARP)
            total += other if there & 31 == there else num.zero
        there = i32(lane + way * 2)
        other = shfl_idx_f32(total, i32(there & 31), FULL_WARP)
        return other if there & 31 == there else num.zero, total

    def table(byte: int, onward: bool, *, raised: bool = True) -> Callable[..., None]:
        """Return the verb (smem, own, first, tokens, lane). It writes sums from the place with the sum `first` to each
        token, or from each token onward; as powers of 2 if raised; 0 beyond the tokens.
        """

        @verb
        def put_table(smem, own, first, tokens, lane):
            four, left = (
                cuda.local.array(EACH, f32),
                opaque_f32(first),
            )  # or registers would keep one table's sums for another
            for n in range(EACH):
                token = EACH - 1 - n if onward else n
                if onward:
                    four[token] = left
                left += own[token]
                if not onward:
                    four[token] = left
            for n in range(EACH):
                number = num.exp2(four[n]) if raised else four[n]
                four[n] = number if n < tokens else num.zero
            store_four_floats(smem, i32(byte + 4 * EACH * lane), four)

        return put_table

    within, near = table(place_of.within, False, raised=False), table(place_of.near, not back)
    kept, known = table(place_of.kept, not back), table(place_of.known, back)

    @verb
    def _write(tables, own, count):
        """Write all tables of a chunk of `count` tokens."""
        smem, eights = tables
        lane = _lane_again()
        total = ((own[0] + own[1]) + own[2]) + own[3]
        beside = num.shuffle(total, 1, FULL_WARP)  # an eight has two lanes
        total += beside
        begin, end = (num.zero, beside) if lane & 1 == 0 else (beside, num.zero)
        within(smem, own, begin, EACH, lane)
        near(smem, own, begin if back else end, EACH, lane)
        if lane & 1 == 0:
            eights[lane >> 1] = num.exp2(total)
        before, to_here = _sums(total, lane, -1)
        behind, _ = _sums(total, lane, 1)
        if lane == 31:
            eights[EIGHTS] = exp_of(to_here * LOG_2)
        kept(smem, own, begin + before if back else end + behind, i32(count - EACH * lane), lane)
        known(smem, own, end + behind if back else begin + before, EACH, lane)

    @verb
    def put(tables, barriers, i, own, logs, place, rows):
        """Write the tables of the chunk that begins with m0; by a warp, not the first."""
        b, h, m0 = place
        _fetch(own, logs, b, h, m0, rows)
        pipe.claim(barriers, i)
        _write(tables, own, i32(rows - m0))
        written.hand(barriers.full, i)

    @verb
    def release(barriers, i):
        """Release the tables after the lanes of my warp have read them."""
        written.leave()
        pipe.release(barriers, i)

    return members(
        locals(),
        barriers=pipe.barriers,  # () -> in shared memory; once in a kernel, by all threads
        init=pipe.init,  # (barriers): by one thread, before the `start` of a pipeline
        wait=pipe.wait,  # (barriers, i): until they are written
    )
