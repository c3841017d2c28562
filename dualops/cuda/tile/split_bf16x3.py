"""Split float32 numbers into three bfloat16 parts, whose sum is exact: 8 bits of the mantissa each.

    upper, middle, lower = parts_of(x)        each part is truncated from the remainder: nothing is rounded
    put_parts(words, at, apart, a, b)         the parts of two numbers, packed in pairs, `apart` words from part to part

A product of two numbers needs only the six products of parts in PART_PAIRS. The other three (lower times middle, middle
times lower, lower times lower) are below 2**-22 of the product, on average 2**-24 of it. Two parts of tf32 would need
three products. But tensor cores multiply bfloat16 twice as fast as tf32, and can read it along either axis.
"""

from __future__ import annotations

from ..compiler.backend import f32, u32, verb
from ..ptx.arithmetic import bits_of_f32, f32_of_bits

PARTS = 3
# (part of the left factor, part of the right factor) of each product. The smallest products come first: added to a
# large sum, each would cost another rounding of the large sum
PART_PAIRS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))
EXPONENT, SIGN, ONE, UPPER, HALF = u32(0x7F800000), u32(0x80000000), u32(0x3F800000), u32(0xFFFF0000), u32(16)
ZERO = f32(0)


@verb
def upper_part(x):
    """Return x with only the first 8 bits of its mantissa."""
    return f32_of_bits(bits_of_f32(x) & UPPER)


@verb
def packed_parts(a, b):
    """Return a word with one part of each number: a's in the lower half, b's in the upper half."""
    return u32(bits_of_f32(a) >> HALF) | (bits_of_f32(b) & UPPER)


@verb
def parts_of(x):
    """Return the three parts of any number.

    An infinity becomes 1 with its sign, 0 and itself. Lower parts are only multiplied with upper parts, so no part of 0
    and no part of the other sign turns the infinity into NaN. A NaN is split in the same way.
    """
    word = bits_of_f32(x)
    upper = upper_part(x)
    rest = f32(x - upper)
    middle = upper_part(rest)
    lower = f32(rest - middle)
    if word & EXPONENT == EXPONENT:
        upper, middle, lower = f32_of_bits(word & SIGN | ONE), ZERO, f32(x + x)
    return upper, middle, lower


@verb
def put_parts(words, at, apart, a, b):
    """Write the parts of two numbers, finite or NaN, to words[at], words[at + apart] and words[at + 2 * apart]."""
    words[at] = packed_parts(a, b)
    a_rest, b_rest = f32(a - upper_part(a)), f32(b - upper_part(b))
    words[at + apart] = packed_parts(a_rest, b_rest)
    words[at + 2 * apart] = packed_parts(f32(a_rest - upper_part(a_rest)), f32(b_rest - upper_part(b_rest)))
