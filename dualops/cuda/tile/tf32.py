"""Convert float32 numbers to tf32, with 11 bits of mantissa; or to two such parts, whose sum has float32's 24 bits."""

from __future__ import annotations

from ..compiler.backend import f32, u32, verb
from ..ptx.arithmetic import f32_of_bits
from ..ptx.convert import tf32_of_f32

EXPONENT, SIGN, ONE = u32(0x7F800000), u32(0x80000000), u32(0x3F800000)


@verb
def rounded(x):
    """Return x rounded to tf32."""
    return f32_of_bits(tf32_of_f32(x))


@verb
def rounded_word(word):
    """Round a float32 number, given as its bits, to tf32."""
    return tf32_of_f32(f32_of_bits(word))


@verb
def parts(x):
    """Return the upper part of x, and the lower part: the rounding error of the upper one."""
    upper, lower = words_of_parts(x)
    return f32_of_bits(upper), f32_of_bits(lower)


@verb
def words_of_parts(x):
    """Return the bits of both parts.

    An infinity becomes 1 with its sign and itself. Lower parts are only multiplied with upper parts, so no lower part
    that is 0 or has the other sign turns the infinity into NaN. A NaN is split in the same way.
    """
    upper = tf32_of_f32(x)
    lower = upper
    if upper & EXPONENT == EXPONENT:
        upper = upper & SIGN | ONE
    else:
        lower = tf32_of_f32(f32(x - f32_of_bits(upper)))
    return upper, lower
