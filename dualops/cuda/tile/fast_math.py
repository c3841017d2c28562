"""Functions of float32 for kernels of 16-bit dtypes: fewer instructions than libdevice's, and less accurate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import Members, f32, members, noun, verb
from ..ptx.arithmetic import ex2_approx_ftz, rcp_approx_ftz
from .numbers import LOG2_E

ONE, HALF, TWICE = f32(1), f32(0.5), f32(2 * LOG2_E)
# coefficients of tanh(x) / x in powers of x**2, with the least maximum error of tanh for |x| <= 1: 2.4e-7
NEAR = tuple(map(f32, (0.99999684, -0.33324003, 0.13253528, -0.050972924, 0.016114252, -0.002839495)))
DOUBLE, LARGE = f32(2), f32(2.0**126)
# the same for |x| below these bounds, with an error of 1.7e-7
NEARER_BOUND, NEARER = f32(0.3), tuple(map(f32, (0.99999601, -0.332974796, 0.1252259)))
NEAREST_BOUND, NEAREST = f32(0.115), tuple(map(f32, (0.99999277, -0.33114207)))
SMALL, THIRD, REST = f32(0.125), f32(-1 / 3), f32(2 / 15)


@verb
def bounded_fast_tanh(x, rate, size):
    """Return size * tanh(rate * x), with an error of 3e-7 of size."""
    return size - size * rcp_approx_ftz(HALF + ex2_approx_ftz(x * (rate * TWICE) - ONE))


@verb
def fast_tanh_slope(x, rate):
    """Return 1 - tanh(rate * x)**2 from the same special functions: 2 E r**2, with r = 1 / (1/2 + E).

    The relative error is 1e-6 + 2.4e-7 * |rate * x|, because the exponent is rounded.
    """
    power = ex2_approx_ftz(x * (rate * TWICE) - ONE)
    r = rcp_approx_ftz(HALF + power)
    return DOUBLE * r * (min(power, LARGE) * r)


@verb
def near_tanh(x, rate, size):
    """Return size * tanh(rate * x) for |rate * x| <= 1, by a polynomial: without the special-function unit."""
    x *= rate
    square = x * x
    of_square = NEAR[5]
    for n in range(5):
        of_square = of_square * square + NEAR[4 - n]
    return size * (x * of_square)


@noun
def fast_tanh_curve() -> Members:
    """The curve of tanh: size * f(rate * x) - less for an odd, nondecreasing f, with an error of 3e-7 of size.

    The verbs have the arguments (x, numbers, less). For small x they use polynomials instead of special functions.
    """
    LEAST, MOST = f32(2.0**-20), f32(2.0**20)  # between them, a rate's fifth power neither underflows nor overflows

    @verb
    def numbers(rate, size):
        """Return the numbers that the other verbs need."""
        return rate, size

    @verb
    def any(x, numbers, less):
        rate, size = numbers[0], numbers[1]
        return (size - less) - size * rcp_approx_ftz(HALF + ex2_approx_ftz(x * (rate * TWICE) - ONE))

    @verb
    def _of_near(x, numbers, less):
        return near_tanh(x, numbers[0], numbers[1]) - less

    @verb
    def _of_nearer(x, numbers, less):
        rate, size = numbers
        square, first, third = x * x, size * rate, size * rate * (rate * rate)
        fifth = third * (rate * rate) * NEARER[2]
        return x * ((fifth * square + third * NEARER[1]) * square + first * NEARER[0]) - less

    @verb
    def _of_nearest(x, numbers, less):
        rate, size = numbers
        first, third = size * rate * NEAREST[0], size * rate * (rate * rate) * NEAREST[1]
        return x * (third * (x * x) + first) - less

    @verb
    def _are_near(largest, numbers):
        return largest * numbers[0] < ONE

    def are_below(bound: Any) -> Callable[..., Any]:
        @verb
        def are(largest, numbers):
            rate = numbers[0]
            return (largest * rate < bound) & (rate > LEAST) & (rate < MOST)

        return are

    nearer = (_of_near, _are_near), (_of_nearer, are_below(NEARER_BOUND)), (_of_nearest, are_below(NEAREST_BOUND))
    return members(
        locals(),
        # variants for small x, for the smallest x last; each with (largest, numbers) -> whether it is valid up to that
        # |x|
        nearer=nearer,
    )


@verb
def near_tanh_slope(x, rate):
    """Return 1 - tanh(rate * x)**2 by the same polynomial. It is at least 0.42, so the difference loses no digits."""
    bent = near_tanh(x, rate, ONE)
    return ONE - bent * bent


@verb
def fast_tanh(x):
    """Return tanh(x) with a relative error of 3e-6. It has no branch, so the compiler can reuse parts for the slope."""
    square = x * x
    small, other = x + x * square * (THIRD + square * REST), bounded_fast_tanh(x, ONE, ONE)
    return small if abs(x) < SMALL else other
