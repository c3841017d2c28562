"""Conversions between float32 and the shorter formats. A 32-bit word holds two 16-bit values, the lower one first."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from ..simulator import single
from .asm import instruction

# four bytes, twice four and two bytes, written as one type and read as another
_WORD, _WORDS, _HALF = np.zeros(1, np.uint32), np.zeros(2, np.uint32), np.zeros(1, np.uint16)
_SINGLE, _SINGLES = _WORD.view(np.float32), _WORDS.view(np.float32)
_TWO_F16, _F16 = _WORD.view(np.float16), _HALF.view(np.float16)
INFINITY = 0x7F800000


def _upper(bits):
    """Return the upper half of a float32's bits, rounded to nearest, ties to even; faster than ml_dtypes."""
    if bits & 0x7FFFFFFF > INFINITY:
        return bits >> 16 & 0x8000 | 0x7FC0
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


@cache
def _floats(number):
    """Return the two 16-bit numbers as floats."""
    return list(np.arange(1 << 16, dtype=np.uint16).view(number).astype(np.float32))


def _halves(word, number):
    word, floats = int(word), _floats(number)
    return floats[word & 0xFFFF], floats[word >> 16]


@instruction("(f32, f32) -> u32", "cvt.rn.bf16x2.f32 {d}, {high}, {low};", section="9.7.9.22", pure=True)
def pack_bf16x2(low, high):
    """Two floats rounded to bfloat16, in one word."""
    _SINGLES[0], _SINGLES[1] = low, high
    low_bits, high_bits = _WORDS.tolist()
    return _upper(low_bits) | _upper(high_bits) << 16


@instruction("(f32, f32) -> u32", "cvt.rn.f16x2.f32 {d}, {high}, {low};", section="9.7.9.22", pure=True)
def pack_f16x2(low, high):
    """Two floats rounded to float16, in one word."""
    _TWO_F16[0] = single(low)
    _TWO_F16[1] = single(high)
    return _WORD.item()


@instruction(
    "(u32) -> (f32, f32)",
    "{ .reg .b32 t; shl.b32 t, {word}, 16; mov.b32 {d0}, t; and.b32 t, {word}, 0xffff0000; mov.b32 {d1}, t; }",
    section="9.7.8.9",
    pure=True,
)
def unpack_bf16x2(word):
    """The two bfloat16 of a word as floats, exactly."""
    return _halves(word, ml_dtypes.bfloat16)


@instruction(
    "(u32) -> (f32, f32)",
    "{ .reg .b16 low, high; mov.b32 {low, high}, {word}; cvt.f32.f16 {d0}, low; cvt.f32.f16 {d1}, high; }",
    section="9.7.9.22",
    pure=True,
)
def unpack_f16x2(word):
    """The two float16 of a word as floats, exactly."""
    return _halves(word, np.float16)


@instruction("(f32) -> u16", "cvt.rn.bf16.f32 {d}, {x};", section="9.7.9.22", pure=True)
def bf16_of_f32(x):
    """The bits of x rounded to bfloat16."""
    _SINGLE[0] = x
    return _upper(_WORD.item())


@instruction("(f32) -> u16", "cvt.rn.f16.f32 {d}, {x};", section="9.7.9.22", pure=True)
def f16_of_f32(x):
    """The bits of x rounded to float16."""
    _F16[0] = single(x)
    return _HALF.item()


@instruction(
    "(u16) -> f32", "{ .reg .b16 zero; mov.b16 zero, 0; mov.b32 {d}, {zero, {x}}; }", section="9.7.9.5", pure=True
)
def f32_of_bf16(x):
    """The float whose upper half these bits are."""
    return _floats(ml_dtypes.bfloat16)[x]


@instruction("(u16) -> f32", "cvt.f32.f16 {d}, {x};", section="9.7.9.22", pure=True)
def f32_of_f16(x):
    """The float of these float16 bits, exactly."""
    return _floats(np.float16)[x]


@instruction("(f32) -> u32", "cvt.rna.tf32.f32 {d}, {x};", section="9.7.9.22", pure=True)
def tf32_of_f32(x):
    """The bits of x rounded to 11 bits of mantissa, ties away from zero."""
    _SINGLE[0] = x
    bits = _WORD.item()
    return bits if bits & INFINITY == INFINITY else bits + 0x1000 & 0xFFFFE000
