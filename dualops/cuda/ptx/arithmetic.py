"""Arithmetic instructions whose results must be bitwise equal when compiled and simulated, or that Python lacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..compiler.backend import SIMULATED
from ..simulator import double, single
from .asm import instruction

_TINY, _ZERO = np.finfo(np.float32).tiny, np.float32(0)
# four and eight bytes, written as one type and read as another
_WORD, _LONG = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
_SINGLE, _DOUBLE = _WORD.view(np.float32), _LONG.view(np.float64)


@instruction("(f32) -> f32", "ex2.approx.ftz.f32 {d}, {x};", section="9.7.3.22", pure=True)
def ex2_approx_ftz(x):
    """2 ** x, relative error 2**-22.5, denormals flushed to zero."""
    result = np.exp2(single(x))
    return result if result >= _TINY or result != result else _ZERO


@instruction("(f32) -> f32", "rcp.approx.ftz.f32 {d}, {x};", section="9.7.3.15", pure=True)
def rcp_approx_ftz(x):
    """Return 1 / x, to 1 ulp; denormal inputs and results are zeros."""
    x = single(x)
    with np.errstate(divide="ignore"):
        result = np.float32(1) / (x if abs(x) >= _TINY or x != x else np.copysign(np.float32(0), x))
    return result if abs(result) >= _TINY or result != result else np.copysign(np.float32(0), result)


@instruction("(f32) -> f32", "lg2.approx.f32 {d}, {x};", section="9.7.3.21", pure=True)
def lg2_approx(x):
    """log2(x); -inf for 0, NaN for negative x."""
    return np.log2(single(x))


def _larger(a, b):
    """Return the larger number, as PTX `max` does: +0 is more than -0, and a NaN is less than any number."""
    if a == b:
        return b if a == 0 and np.signbit(a) else a
    return b if b > a or a != a else a


@instruction("(f32, f32) -> f32", "max.f32 {d}, {a}, {b};", section="9.7.3.12", pure=True)
def max_f32(a, b):
    """The larger; of a number and a NaN, the number."""
    return _larger(single(a), single(b))


_OF_WORDS = (
    "{ .reg .b32 x, y, z; mov.b32 x, {a}; mov.b32 y, {b}; mov.b32 z, {c}; %s x, x, y; %s x, x, z; mov.b32 {d}, x; }"
)


@instruction("(f32, f32, f32) -> f32", _OF_WORDS % ("max.s32", "max.s32"), section="9.7.1.13", pure=True)
def largest_word(a, b, c):
    """Return the number whose bits are the largest signed integer; one instruction from sm_90 on.

    That is the largest number (or a NaN) if any is not negative, and the smallest number if all are negative.
    """
    return max(single(a), single(b), single(c), key=_as_integer)


@instruction("(f32, f32, f32) -> f32", _OF_WORDS % ("min.s32", "min.s32"), section="9.7.1.12", pure=True)
def smallest_word(a, b, c):
    """Return the number whose bits are the smallest signed integer: the largest number if all are negative."""
    return min(single(a), single(b), single(c), key=_as_integer)


@instruction("(f32, f32, f32) -> f32", _OF_WORDS % ("max.u32", "max.u32"), section="9.7.1.13", pure=True)
def largest_unsigned_word(a, b, c):
    """Return the number whose bits are the largest unsigned integer.

    That is the smallest number (or a NaN) if any is negative, and the largest number if none is negative.
    """
    return max(single(a), single(b), single(c), key=lambda x: _as_integer(x) & 0xFFFFFFFF)


def _as_integer(x):
    _SINGLE[0] = x
    return int(_WORD.view(np.int32)[0])


@instruction("(f32, f32) -> f32", "max.NaN.f32 {d}, {a}, {b};", section="9.7.3.12", pure=True)
def max_nan_f32(a, b):
    """The larger; NaN if one is NaN. From sm_80 on."""
    a, b = single(a), single(b)
    return np.float32(math.nan) if a != a or b != b else _larger(a, b)


@instruction("(f32, f32) -> f32", "min.NaN.f32 {d}, {a}, {b};", section="9.7.3.11", pure=True)
def min_nan_f32(a, b):
    """The smaller; NaN if one is NaN. From sm_80 on."""
    a, b = single(a), single(b)
    return np.float32(math.nan) if a != a or b != b else -_larger(-a, -b)


@instruction("(f64, f64) -> f64", "max.f64 {d}, {a}, {b};", section="9.7.3.12", pure=True)
def max_f64(a, b):
    """The larger; of a number and a NaN, the number."""
    return _larger(double(a), double(b))


@instruction("(f32, f32) -> f32", "mul.rn.f32 {d}, {a}, {b};", section="9.7.3.5", pure=True)
def mul_rn(a, b):
    """a * b rounded to nearest, never contracted into a fused multiply-add."""
    return single(a) * single(b)


@instruction("(f32, f32) -> f32", "add.rn.f32 {d}, {a}, {b};", section="9.7.3.3", pure=True)
def add_rn(a, b):
    """a + b rounded to nearest, never contracted into a fused multiply-add."""
    return single(a) + single(b)


@instruction("(f32, f32) -> f32", "sub.rn.f32 {d}, {a}, {b};", section="9.7.3.4", pure=True)
def sub_rn(a, b):
    """a - b rounded to nearest, never contracted into a fused multiply-add."""
    return single(a) - single(b)


@instruction("(f64, f64) -> f64", "mul.rn.f64 {d}, {a}, {b};", section="9.7.3.5", pure=True)
def mul_rn_f64(a, b):
    """a * b in double precision, never contracted into a fused multiply-add."""
    return double(a) * double(b)


@instruction("(f64, f64) -> f64", "add.rn.f64 {d}, {a}, {b};", section="9.7.3.3", pure=True)
def add_rn_f64(a, b):
    """a + b in double precision, never contracted into a fused multiply-add."""
    return double(a) + double(b)


@instruction("(f64, f64) -> f64", "sub.rn.f64 {d}, {a}, {b};", section="9.7.3.4", pure=True)
def sub_rn_f64(a, b):
    """a - b in double precision, never contracted into a fused multiply-add."""
    return double(a) - double(b)


@instruction("(f32, f32, f32) -> f32", "fma.rn.f32 {d}, {a}, {b}, {c};", section="9.7.3.6", pure=True)
def fma_rn(a, b, c):
    """a * b + c, rounded once."""
    a, b, c = float(single(a)), float(single(b)), float(single(c))
    product = a * b  # exact
    total = product + c
    if not math.isfinite(total):
        return single(total)
    rest = (product - (total - (total - product))) + (c - (total - product))  # the rounding error of the addition
    if rest and not bits_of_f64(total) & 1:  # round to odd: then the second rounding has the result of a single one
        total = math.nextafter(total, math.copysign(math.inf, rest))
    return single(total)


@instruction("(u32, u32) -> u64", "mul.wide.u32 {d}, {a}, {b};", section="9.7.1.3", pure=True)
def mul_wide_u32(a, b):
    """All 64 bits of the product."""
    return int(a) * int(b)


@instruction(
    "(u32, u32) -> u32",
    "{ .reg .b32 size; abs.f16x2 size, {words}; set.geu.u32.f16x2 {d}, size, {bounds}; }",
    section="9.7.7.1",
    pure=True,
)
def at_least_15_bits(words, bounds):
    """Return all ones in each half whose lower 15 bits are at least those of the bound's half (at most 0x7c00), else 0.

    It compares the bits as float16 without a sign: these are in order, infinity is the largest, and NaN is above it.
    """
    found = 0
    for half in (0, 16):
        bound = int(bounds) >> half & 0xFFFF
        if bound > 0x7C00:
            raise ValueError(f"at_least_15_bits: bound {bound:#06x}, expected at most 0x7c00")
        if (int(words) >> half & 0x7FFF) >= bound:
            found |= 0xFFFF << half
    return found


@instruction("(f32) -> u32", "mov.b32 {d}, {x};", section="9.7.9.5", pure=True)
def bits_of_f32(x):
    """The 32 bits of a float."""
    _SINGLE[0] = x
    return _WORD.item()


@instruction("(u32) -> f32", "mov.b32 {d}, {x};", section="9.7.9.5", pure=True)
def f32_of_bits(x):
    """The float with these 32 bits."""
    _WORD[0] = x
    return _SINGLE[0]


@instruction("(i32) -> i32", "mov.b32 {d}, {x};", section="9.7.9.5", pure=True)
def opaque_i32(x):
    """Return x, as 32 bits whose origin the compiler does not know.

    An index into shared memory that is a constant more than such an x costs nothing: the constant is part of the access
    instruction. Otherwise Numba computes the index in 64 bits, and every access computes its own address.
    """
    return int(x)


@instruction("(f64) -> u64", "mov.b64 {d}, {x};", section="9.7.9.5", pure=True)
def bits_of_f64(x):
    """The 64 bits of a double."""
    _DOUBLE[0] = x
    return _LONG.item()


def _radians(half_turns):
    """Return an angle in radians, without whole turns, which are removed exactly."""
    return np.pi * (half_turns - 2.0 * np.rint(double(half_turns) / 2.0))


def _libdevice(name: str, twin: Callable[..., Any]) -> Any:
    """Return libdevice's function of this name, which has all bits but the last or two; in the simulator its twin."""
    if SIMULATED:
        return twin
    from numba.cuda import libdevice

    return getattr(libdevice, name)


exp_f64 = _libdevice("exp", lambda x: np.exp(double(x)))
exp2_f64 = _libdevice("exp2", lambda x: np.exp2(double(x)))
log_f64 = _libdevice("log", lambda x: np.log(double(x)))  # -inf for 0
log2_f64 = _libdevice("log2", lambda x: np.log2(double(x)))  # -inf for 0
tanh_f64 = _libdevice("tanh", lambda x: np.tanh(double(x)))
tanh_f32 = _libdevice("tanhf", lambda x: np.tanh(single(x)))  # tanh.approx has only eleven bits
erfc_f64 = _libdevice("erfc", lambda x: double(math.erfc(x)))  # 1 - erf(x), also where erf(x) is nearly 1
erfc_f32 = _libdevice("erfcf", lambda x: single(math.erfc(x)))
pow_f64 = _libdevice("pow", lambda x, y: np.power(double(x), double(y)))
cospi_f64 = _libdevice("cospi", lambda x: np.cos(_radians(x)))  # cos(pi * x)
sinpi_f64 = _libdevice("sinpi", lambda x: np.sin(_radians(x)))


@instruction(
    "(f32) -> void",
    "{ .reg .pred never; setp.lt.f32 never, {x}, 0fBF800000; @never nanosleep.u32 0; }",
    section="9.7.19.10",
    convergent=True,
)
def settle(x):
    """Force a nonnegative sum to be computed before the next code.

    Otherwise the assembler would first wait for products, although the sum should be computed during them.
    """
    if x < -1:
        raise RuntimeError(f"settle: {x}, expected nothing below 0")


@instruction(
    "(u32) -> void",
    "{ .reg .pred all; setp.eq.u32 all, {x}, 0xFFFFFFFF; @all nanosleep.u32 0; }",
    section="9.7.19.10",
    convergent=True,
)
def settle_bits(x):
    """Force any 32 bits to be computed before the next code (`settle`), such as the bitwise or of several numbers."""
    if not 0 <= x < 1 << 32:
        raise RuntimeError(f"settle_bits: {x}, expected 32 bits")


@instruction("(f32) -> f32", "mov.b32 {d}, {x};", section="9.7.9.5")
def opaque_f32(x):
    """Return x, as a number whose origin the compiler does not know: it computes everything that uses x after this."""
    return x


@instruction("(i32) -> i32", "mov.b32 {d}, {x};", section="9.7.9.5")
def recomputed_i32(x):
    """Return x, as a number whose origin the compiler does not know.

    So the compiler recomputes what depends on it, and keeps no registers for that in between.
    """
    return int(x)
