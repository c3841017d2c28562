"""What rounding takes from the scores of pairs of near tokens, which may be all that a query sees.

P is rounded to 16 bits for P @ V. Where many tokens are seen, errors of so many scores are lost in each other, and in
the rounding of o. A head that forgets at once sees the last few: then each error counts, and in one draw of five o is
further off than twice its own rounding. So of the 16 x 16 pairs of a warp's own tokens the rest is multiplied, too, by
the warp alone, as a warpgroup's products have no registers for it:

    o [16, Dv] += (P - rounded P) [16, 16] @ V [16, Dv]          mma.sync, V by ldmatrix from its boxes
"""

from __future__ import annotations

from functools import cache

from ..compiler.backend import Members, cuda, i32, noun, u32, verb
from ..ptx.convert import pack_bf16x2, unpack_bf16x2
from ..ptx.ldmatrix import ldmatrix
from ..ptx.mma import mma_m16n8k16
from ..tile.products import anew_i32
from ..tile.swizzle import Operand
from .state_smem import BOX, SPAN, rest

OWN = 16  # tokens
WORDS = 4  # of a thread, of 16 x 16 pairs


@cache
@noun
def diagonal_residual(v: Operand) -> Members:
    """The verbs for V as boxes bring it, of bfloat16, 16 tokens for each warp that multiplies.

    Called by a warpgroup.
    """
    load, multiply, STEPS = ldmatrix(4, True), mma_m16n8k16("bf16"), v.lines // OWN

    @verb
    def _my_warp():
        """Among those that share V's tokens; what follows from it is not kept from chunk to chunk."""
        return i32(u32(anew_i32(i32(cuda.threadIdx.x))) // u32(32) % u32(STEPS))

    @verb
    def words():
        """Return a local array for what is kept."""
        return cuda.local.array(WORDS, u32)

    @verb
    def keep(words, scores):
        """Keep what packing will round off the scores of my warp's own tokens."""
        warp = _my_warp()
        for own in range(STEPS):
            if own == warp:
                for word in range(WORDS):
                    at = WORDS * own + word
                    low, high = unpack_bf16x2(pack_bf16x2(scores[2 * at], scores[2 * at + 1]))
                    words[word] = pack_bf16x2(rest(scores[2 * at] - low), rest(scores[2 * at + 1] - high))

    @verb
    def add(o, words, smem, v_at):
        """Add the product of what was kept and V to o, once o's products are over."""
        lane = i32(u32(anew_i32(i32(cuda.threadIdx.x))) % u32(32))
        line = v_at + (OWN * _my_warp() + lane % OWN) * SPAN
        right = cuda.local.array(WORDS, u32)
        for column in range(0, v.width, OWN):
            byte = 2 * (column % BOX) + lane // OWN * 16
            load(right, 0, smem, i32(line + column // BOX * v.box + (byte ^ (lane % 8) << 4)))
            multiply(o, column // 2, words, 0, right, 0)
            multiply(o, column // 2 + 4, words, 0, right, 2)

    return locals()
