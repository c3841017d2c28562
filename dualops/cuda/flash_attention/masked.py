"""The mark of a product that a mask hides: a NaN that no arithmetic gives.

A product may be -inf with no mask, and an option may make a score that counts of it, as softcap does.
"""

from __future__ import annotations

from ..compiler.backend import u32, verb
from ..ptx.arithmetic import bits_of_f32, f32_of_bits, max_nan_f32 as max_or_nan, min_nan_f32 as min_or_nan

__all__ = ["is_marked", "mark", "max_or_nan", "min_or_nan"]

MARK = u32(0x7FC0D0A1)  # tensor cores' own NaN is 0x7FFFFFFF


@verb
def mark():
    return f32_of_bits(MARK)


@verb
def is_marked(x):
    return bits_of_f32(x) == MARK
