"""The decay between two tokens of a chunk, and between a token and the state.

    of a pair      gamma^(r - c), c <= r                 of passes that go back gamma^(c - r), c >= r
    of the state   gamma^(r + 1) for query r             gamma^(n - 1 - r), n being the tokens of the chunk
    to the state   gamma^(n - 1 - c) of token c          gamma^(c + 1)

The passes of `chunks` and `wide` call these verbs. `constant_decay` has a head's gamma. `per_token_decay` has each
step's decay, from tables of the chunk (`decay_tables`).

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

`decay_tables` also has the barriers between the warp that computes the tables and the consumers:

    the warp, of a chunk            consumers
    put(...)                        wait(barriers, i);  ...;  release(barriers, i)

There is one buffer. The tables of a chunk are written when all consumers have read those of the previous chunk.
"""

from __future__ import annotations

from collections.abc import Callable

from ...compiler.backend import Members, cuda, f32, i32, kept_noun, members, u32, verb
from ...launch.views import number_type, start
from ...ptx.arithmetic import bits_of_f32, f32_of_bits
from ...ptx.memory import ld_shared_b32, ld_shared_v2_f32, st_shared_v4_b32
from ...ptx.warp import bar_warp_sync
from ...tile.epilogue import opaque_f32
from ...tile.numbers import LOG2_E, numbers
from ...tile.pipeline import arrivals, arrives, places
from ...tile.products import opaque_i32
from ...tile.rows import FULL_WARP, shfl_idx_f32
from ...tile.unrolled import local_array
from ..decays import LEAST_KEPT, decay, exp_of_step
from .config import CHUNK, DECAY_TABLES, DTYPE
from .states import column_of, my_column, my_row, my_thread_again, row_of

EIGHT = 8  # tokens
EIGHTS = CHUNK // EIGHT
EACH = CHUNK // 32  # tokens of a lane
LEAST = -128.0  # of a step: the decay is 0 in float32


@kept_noun
def constant_decay(chunk: int, width: int, back: bool) -> Members:
    """The verbs for chunks of `chunk` tokens and o of `width` columns. back: tokens see those after them.

    row: the warpgroup's first one. r, c: tokens of the chunk, which has `count` tokens. `per_token_decay` has the same
    verbs, with `mine` instead of log2_gamma.
    """
    num, own = numbers(f32), decay(DTYPE)
    power, QUADS, SCORE_QUADS = own.power, width // 8, chunk // 8

    @verb
    def again(log2_gamma):
        """Return log2_gamma, but registers keep nothing computed from it between chunks."""
        return opaque_f32(log2_gamma)

    @verb
    def pairs(scores, row, log2_gamma, scale):
        """Multiply a chunk's scores by their decay and scale; 0 where a pair is not seen.

        From a row's nearest pair on, because the factor falls by gamma^8 from quad to quad.
        """
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
        """Multiply o by scale and by the decay from the state to each row."""
        for h in range(2):
            r = i32(row + my_row() + 8 * h)
            factor = power(log2_gamma, max(i32(count - 1 - r), i32(0)) if back else i32(r + 1)) * scale
            for j in range(QUADS):
                for e in range(2):
                    o[4 * j + 2 * h + e] *= factor

    @verb
    def weight(args, token):
        """Return the decay from a token to the next state; 0 from token number count on."""
        log2_gamma, count, scale = args
        value = power(log2_gamma, i32(token + 1)) * scale if back else power(log2_gamma, i32(count - 1 - token))
        return value if token < count else num.zero

    @verb
    def of_pair(log2_gamma, r, c):
        """Return the decay from c to r, for a pair that is seen."""
        return power(log2_gamma, i32(c - r) if back else i32(r - c))

    @verb
    def of_row(log2_gamma, r, count):
        """Return the decay from the state to row r."""
        return power(log2_gamma, i32(count - 1 - r) if back else i32(r + 1))

    @verb
    def forgets(log2_gamma):
        """Return whether the decay is so fast that the rounding errors of neighbouring tokens' scores count."""
        return log2_gamma < LEAST_KEPT

    return members(
        locals(),
        argument=number_type(DTYPE, 1),  # the type of a kernel's argument `decay`
        of=own.log2,  # (decay, call, h) -> log2_gamma
        fade=power,  # (log2_gamma, count) -> the decay of the state over a chunk
    )


# --- the decay of each step --------------------------------------------------------------------------


@verb
def load_float(array, at):
    return f32_of_bits(ld_shared_b32(array, at))


def tables_at(at: int) -> list[int]:
    """Return the bytes at which the tables of tokens begin: within, near, kept and known, the first one at `at`."""
    return [at + n * DECAY_TABLES // 4 for n in range(4)]


@kept_noun
def decay_tables(at: int, back: bool, warps: int) -> Members:
    """The verbs for tables from byte `at` on, read by `warps` warps. back: tokens see those after them. `i` numbers the
    chunks of a block. tables: shared memory, and the array of the eights in it.
    """
    place = places(1, arrivals(1), arrivals(warps))
    num, LOG2, SMALLEST = numbers(f32), f32(LOG2_E), f32(LEAST)
    exp_of, LOG_2 = exp_of_step(DTYPE), f32(1 / LOG2_E)

    @verb
    def eights():
        """Return the array of the eights; once in a kernel, by all threads."""
        return cuda.shared.array(EIGHTS + 1, f32)

    @verb
    def _lane_again():
        return i32(u32(my_thread_again()) % u32(32))

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
            four = cuda.local.array(EACH, f32)
            left = opaque_f32(first)  # or registers would keep one table's sums for another
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
            a, b, c, d = bits_of_f32(four[0]), bits_of_f32(four[1]), bits_of_f32(four[2]), bits_of_f32(four[3])
            st_shared_v4_b32(smem, i32(byte + 4 * EACH * lane), a, b, c, d)

        return put_table

    within_at, near_at, kept_at, known_at = tables_at(at)
    within, near = table(within_at, False, raised=False), table(near_at, not back)
    kept, known = table(kept_at, not back), table(known_at, back)

    @verb
    def _write(tables, own, count):
        """Write all tables of a chunk of `count` tokens."""
        smem, eights = tables
        lane = _lane_again()
        total = ((own[0] + own[1]) + own[2]) + own[3]
        neighbour = num.shuffle(total, 1, FULL_WARP)  # an eight has two lanes
        total += neighbour
        begin, end = (num.zero, neighbour) if lane & 1 == 0 else (neighbour, num.zero)
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
    def put(tables, barriers, i, own, logs, chunk_at, rows):
        """Write the tables of the chunk that begins with m0; by a warp, not the first."""
        b, h, m0 = chunk_at
        _fetch(own, logs, b, h, m0, rows)
        place.claim(barriers, i)
        _write(tables, own, i32(rows - m0))
        place.hand(barriers, i)

    @verb
    def release(barriers, i):
        """Release the tables after the lanes of my warp have read them."""
        bar_warp_sync(FULL_WARP)
        if arrives():
            place.free(barriers, i)

    return members(
        locals(),
        own=local_array(EACH, f32),  # () -> for the logarithms that a lane has loaded
        barriers=place.barriers,  # () -> in shared memory; once in a kernel, by all threads
        init=place.init,  # (barriers): by one thread, before the `start` of a pipeline
        wait=place.take,  # (barriers, i): until they are written
    )


@kept_noun
def per_token_decay(width: int, at: int, back: bool) -> Members:
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
        return tables

    @verb
    def pairs(scores, row, mine, scale):
        (smem, eights), tid = mine, my_thread_again()
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
        r = i32(row + row_of(my_thread_again()))
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

    return members(locals(), argument=number_type(DTYPE, 3))
