"""float32 numbers as tensor cores take them: 11 bits of mantissa; or two such parts, whose sum has float32's 24.

Numbers in tf32 are words here, the bits of a float32 whose lowest 13 are 0.
"""

from __future__ import annotations

from ..backend import f32, i32, u32, verb
from ..ptx.arithmetic import f32_of_bits
from ..ptx.convert import tf32_of_f32
from ..ptx.memory import st_global_kept_v4_b32

EXPONENT, SIGN, ONE = u32(0x7F800000), u32(0x80000000), u32(0x3F800000)


@verb
def rounded_word(x):
    """x as one part."""
    return tf32_of_f32(x)


@verb
def words_of_parts(x):
    """The upper part of x and the lower one, which is what rounding left.

    An infinity is its sign's 1 and itself: the product of lower parts is left out, so that it meets upper parts alone,
    and neither a lower part that is 0 nor one of the other sign makes a NaN of it. A NaN likewise.
    """
    upper = tf32_of_f32(x)
    lower = upper
    if upper & EXPONENT == EXPONENT:
        upper = upper & SIGN | ONE
    else:
        lower = tf32_of_f32(f32(x - f32_of_bits(upper)))
    return upper, lower


@verb
def store_four(y, index, keep, words):
    """Four words to y[index] and following, an array of float32, aligned to 16 bytes; for what is read again soon."""
    st_global_kept_v4_b32(y, index, i32(keep), words[0], words[1], words[2], words[3])
