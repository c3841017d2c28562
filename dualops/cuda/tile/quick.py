"""Functions of float32 for kernels of 16-bit dtypes: few instructions, and less exact than libdevice's."""

from __future__ import annotations

from ..backend import f32, verb
from ..ptx.arithmetic import ex2_approx_ftz, rcp_approx_ftz
from .numbers import LOG2_E

ONE, HALF, TWICE = f32(1), f32(0.5), f32(2 * LOG2_E)
SMALL, THIRD, REST = f32(0.125), f32(-1 / 3), f32(2 / 15)


@verb
def bounded_quick_tanh(x, rate, size):
    """size * tanh(rate * x) to 3e-7 of size."""
    return size - size * rcp_approx_ftz(HALF + ex2_approx_ftz(x * (rate * TWICE) - ONE))


@verb
def quick_tanh(x):
    """tanh(x) to 3e-6 of itself."""
    square = x * x
    small = x + x * square * (THIRD + square * REST)
    return small if abs(x) < SMALL else bounded_quick_tanh(x, ONE, ONE)
