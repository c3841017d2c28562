"""P = exp(score - lse), where the score is recomputed and lse was saved by forward.

If lse is large, a recomputed score may differ from forward's by a few ulps, which is more than 1. So a few ulps are
subtracted from lse, and P is at most 1: scores within these ulps of the maximum count as equal to it.

    P = exp2(min(score - lse', 0) * log2(e))           lse': `lowered`

If no option changes products, or softcap alone, which bounds them, P is one fma and one exponential instead:

    P = exp2(product * (scale * log2(e)) - lse * log2(e))

Then half an ulp of lse * log2(e) must be small. A row of large lse has NaN in place of lse, and everything that becomes
NaN is recomputed (`nan_repair`).

`lse_delta_of`: lse and delta of a tile's queries, where queries are columns of scores, from memory through shared
memory. A warp loads them as ordinary numbers, so their addresses need no alignment. A thread needs the columns of its
scores, two of every eight, and finds them next to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import Members, Noun, cuda, f32, f64, i32, members, noun, u32, verb
from ..launch.views import start
from ..tile.numbers import LOG2_E, numbers
from ..tile.products import opaque_i32
from ..tile.softmax_rows import LANES
from ..tile.unrolled import local_array, unrolled
from .options import OptionChain
from .score_coords import min_or_nan

NUM, DOUBLES, LOG2 = numbers(f32), numbers(f64), f32(LOG2_E)
LARGE = f32(2.0**14)  # half an ulp of lse * log2(e) is 2 ** -10 there, less than the rounding of P to bfloat16
LOWERED_FROM, SLACK = f32(2.0**20), f32(2.0**-21)
LEAST = f32(-3.4028234663852886e38)  # finite float32


@verb
def is_large(lse):
    return abs(lse) >= LARGE


@verb
def lowered(lse):
    """Return lse', 0 if a row sees nothing. It is finite if lse is, so that P of a score of -inf is 0."""
    lse = NUM.base(lse)
    return max(lse - abs(lse) * SLACK, LEAST) if abs(lse) > LOWERED_FROM else lse


@verb
def _to_base_2(lse):
    """Return lse * log2(e); 0 if a row sees nothing, NaN if lse is large."""
    lse = NUM.base(lse)
    return NUM.nan if is_large(lse) else lse * LOG2


def is_natural(chain: OptionChain) -> bool:
    """Return whether exponents use lse as it is, lowered: options may produce any score."""
    return chain.scores and chain.near_score is None


def base_of(chain: OptionChain) -> Callable[..., Any]:
    """Return the verb (lse) -> base, which exponents are relative to."""
    return lowered if is_natural(chain) else _to_base_2


@verb
def exponent_less(score, base):
    """Return the exponent to base 2 of a score, relative to a lowered lse."""
    return min_or_nan(score - base, NUM.zero) * LOG2


@verb
def _exponent_by_base_2(score, base):
    return score * LOG2 - base


def exponent_of(chain: OptionChain) -> Callable[..., Any]:
    """Return the verb (score, base) -> the exponent to base 2 of a finished score."""
    return exponent_less if is_natural(chain) else _exponent_by_base_2


@verb
def _single(score, lse):
    lse = NUM.base(lse)
    return NUM.exp(min_or_nan(score - lowered(lse), NUM.zero) if is_large(lse) else score - lse)


@verb
def _double(score, lse):
    return DOUBLES.exp(score - DOUBLES.base(lse))


def exponential_of(number: Any) -> Callable[..., Any]:
    """Return the verb (score, lse) -> P on CUDA cores, in this arithmetic. Forward may have used tensor cores."""
    return _double if number is f64 else _single


@verb
def exponential(score, lse, slack):
    """Return P of a score that was computed by other arithmetic than forward's, and may differ by `slack`."""
    lse = NUM.base(lse)
    return NUM.exp(min_or_nan(score - lse + (slack + abs(lse) * SLACK), NUM.zero) if is_large(lse) else score - lse)


PAD = 4  # floats between the columns of a lane and the next lane's, so that lanes use different banks


def lane_columns(block_q: int) -> int:
    """Return how many floats lie between a lane's columns and the next lane's, for a statistic of `block_q` queries."""
    return block_q // 4 + PAD


Columns = Noun  # of `lse_delta_of`


@verb
def my_lane():
    """Return my lane, unsigned."""
    return u32(cuda.threadIdx.x) % u32(32)


@noun
def lse_delta_of(block_q: int, stages: int, chain: OptionChain) -> Members:
    """The verbs of tiles of `block_q` queries. lse is stored as the base of exponents (`saved_lse`), 0 for a query
    that sees nothing.
    """
    num, to_base = numbers(f32), base_of(chain)
    BLOCK_Q, LANE = block_q, lane_columns(block_q)
    STAGE, DELTA, PER_LANE = 2 * LANES * LANE, LANES * LANE, -(-BLOCK_Q // 32)
    SIZE, OWN = stages * STAGE, 2 * PER_LANE

    @verb
    def slots():
        """Return the shared array of the stages; once in a kernel, by all threads."""
        return cuda.shared.array(SIZE, f32, alignment=16)

    @unrolled(range(PER_LANE))
    def _fetch(own, x, task, h, m0, which, n):
        m = i32(m0 + i32(my_lane()) + 32 * n)
        own[2 * n + which] = num.zero
        if m < task.Sq:  # the address is computed each time: a thread that loads has no register to keep it
            own[2 * n + which] = x.data[start(x, opaque_i32(task.b), h, task.q_first + m)]

    @verb
    def fetch(own, x, task, h, m0):
        """Start to load lse and delta of the queries from m0 on; by all lanes of a warp."""
        _fetch(own, x.lse, task, h, m0, 0)
        _fetch(own, x.delta, task, h, m0, 1)

    @verb
    def put(slots, stage, own):
        """Write the fetched numbers into a free stage."""
        lane = my_lane()
        at = i32(stage * STAGE + i32(lane % u32(8) // u32(2) * u32(LANE) + lane // u32(8) * u32(2) + lane % u32(2)))
        for n in range(PER_LANE):
            if i32(lane) < i32(BLOCK_Q - 32 * n):
                slots[at + 8 * n] = to_base(own[2 * n])
                slots[at + (8 * n + DELTA)] = own[2 * n + 1]

    @verb
    def lse(stage):
        """Return where lse of my columns begins in a stage: number 2 * j + e belongs to my column 8 * j + e."""
        return i32(stage * STAGE + i32(u32(cuda.threadIdx.x) % u32(LANES) * u32(LANE)))

    @verb
    def delta(stage):
        """Return where delta of my columns begins in a stage, in the same order."""
        return i32(stage * STAGE + DELTA + i32(u32(cuda.threadIdx.x) % u32(LANES) * u32(LANE)))

    return members(
        locals(),
        own=local_array(OWN, f32),  # () -> for the numbers that a lane of the loading warp has in flight
    )
