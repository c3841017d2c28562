"""Activations of a product, as verbs on numbers: the value, and the gradient of the input from that of the value."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import pi, sqrt
from typing import Any

from ..compiler.backend import Namespace, verb
from ..tile.numbers import numbers


class Activation(Namespace):
    """The verbs of one activation."""

    value: Callable[..., Any]  # (z) -> act(z)
    pull: Callable[..., Any]  # (z, dy) -> act'(z) * dy


@cache
def activation(name: str | None, number: Any, *, short: bool = False) -> Activation:
    """Return the verbs of "relu", "gelu", "silu" or None, in arithmetic of type f32 or f64.

    short: values are rounded to 16 bits afterwards. gelu and silu may then be less accurate than float32, without a
    branch.
    """
    if name is None:
        return Activation(value=_same, pull=_same_gradient)
    made = {"relu": _relu, "gelu": _gelu, "silu": _silu}[name](number)
    values = {"gelu": _short_gelu, "silu": _short_silu}
    return made.but(value=values[name](number)) if short and name in values else made


@verb
def _same(z):
    return z


@verb
def _same_gradient(z, dy):
    return dy


def _relu(number: Any) -> Activation:
    num = numbers(number)

    @verb
    def value(z):
        return num.zero if z <= num.zero else z  # a NaN stays one

    @verb
    def pull(z, dy):
        return num.zero if z <= num.zero else dy

    return Activation.from_locals(locals())


def _gelu(number: Any) -> Activation:
    """z * Phi(z), Phi(z) = erfc(-z / sqrt(2)) / 2. Where Phi is tiny, 1 + erf would round it to 0."""
    num = numbers(number)
    HALF, MINUS_HALF = number(0.5), number(-0.5)
    SCALE, DENSITY = number(-1 / sqrt(2)), number(1 / sqrt(2 * pi))

    @verb
    def value(z):
        return z * (HALF * num.erfc(z * SCALE))

    @verb
    def pull(z, dy):
        return dy * (HALF * num.erfc(z * SCALE) + z * (DENSITY * num.exp(MINUS_HALF * z * z)))

    return Activation.from_locals(locals())


def _silu(number: Any) -> Activation:
    """z * sigmoid(z)."""
    num = numbers(number)

    @verb
    def value(z):
        return z / (num.one + num.exp(-z))

    @verb
    def pull(z, dy):
        sigmoid = num.one / (num.one + num.exp(-z))
        return dy * (sigmoid * (num.one + z * (num.one - sigmoid)))

    return Activation.from_locals(locals())


# erfc(x) = t * exp(-x * x + polynomial of t), t = 1 / (1 + x / 2), with a relative error of 1.2e-7 for x >= 0; Press,
# Teukolsky, Vetterling & Flannery, Numerical Recipes in C, 2nd ed., section 6.2
ERFC = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806)
ERFC += (0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277)


def _short_gelu(number: Any) -> Callable[..., Any]:
    num = numbers(number)
    HALF, TWO, SCALE = number(0.5), number(2), number(1 / sqrt(2))
    C0, C1, C2, C3, C4, C5, C6, C7, C8, C9 = map(number, ERFC)

    @verb
    def value(z):
        x = abs(z) * SCALE
        t = num.reciprocal(num.one + HALF * x)
        series = C5 + t * (C6 + t * (C7 + t * (C8 + t * C9)))
        series = C0 + t * (C1 + t * (C2 + t * (C3 + t * (C4 + t * series))))
        tail = HALF * t * num.exp(series - x * x)  # Phi(-|z|)
        above = number(z > num.zero)
        return z * (above + (num.one - TWO * above) * tail)

    return value


def _short_silu(number: Any) -> Callable[..., Any]:
    num = numbers(number)

    @verb
    def value(z):
        return z * num.reciprocal(num.one + num.exp(-z))

    return value
