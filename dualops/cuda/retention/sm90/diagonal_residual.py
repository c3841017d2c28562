"""The rounding errors of the scores of neighbouring tokens, which may be all tokens that a query sees.

P is rounded to 16 bits for P @ V. With many tokens the errors of the scores average out below the rounding of o. A head
that forgets at once sees the last few tokens. Then each error counts: in one draw of five, o is off by more than twice
its own rounding. So the errors of the 16 x 16 pairs of a warp's own tokens are multiplied too. The warp does so alone,
because the products of a warpgroup have no registers left:

    o [16, Dv] += (P - rounded P) [16, 16] @ V [16, Dv]          mma.sync, V by ldmatrix from its boxes
"""

from __future__ import annotations

from functools import cache

from ...compiler.backend import Members, cuda, i32, noun, u32, verb
from ...ptx.convert import pack_bf16x2, unpack_bf16x2
from ...ptx.ldmatrix import ldmatrix
from ...ptx.mma import mma_m16n8k16
from ...tile.products import anew_i32
from ...tile.swizzle import Operand
from .config import BOX
from .states import SPAN, rest

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
