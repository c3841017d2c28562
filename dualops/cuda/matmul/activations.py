"""What comes upon a product, as verbs on numbers: the value, and what the gradient of the value makes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import pi, sqrt
from typing import Any, NamedTuple

from ..backend import verb
from ..tile import numbers


class Activation(NamedTuple):
    """The verbs of one activation."""

    value: Callable[..., Any]  # (z) -> act(z)
    pull: Callable[..., Any]  # (z, dy) -> act'(z) * dy


@cache
def activation(name: str | None, number: Any) -> Activation:
    """Of "relu", "gelu" or "silu", or of None, in arithmetic of type f32 or f64."""
    if name is None:
        return Activation(_same, _same_gradient)
    return {"relu": _relu, "gelu": _gelu, "silu": _silu}[name](number)


@verb
def _same(z):
    return z


@verb
def _same_gradient(z, dy):
    return dy


def _relu(number: Any) -> Activation:
    ZERO = number(0)

    @verb
    def value(z):
        return ZERO if z <= ZERO else z  # a NaN stays one

    @verb
    def pull(z, dy):
        return ZERO if z <= ZERO else dy

    return Activation(value, pull)


def _gelu(number: Any) -> Activation:
    """z * Phi(z), Phi(z) = erfc(-z / sqrt(2)) / 2: where Phi is tiny, 1 + erf would have lost it."""
    erfc, exp = numbers(number).erfc, numbers(number).exp
    HALF, MINUS_HALF = number(0.5), number(-0.5)
    SCALE, DENSITY = number(-1 / sqrt(2)), number(1 / sqrt(2 * pi))

    @verb
    def value(z):
        return z * (HALF * erfc(z * SCALE))

    @verb
    def pull(z, dy):
        return dy * (HALF * erfc(z * SCALE) + z * (DENSITY * exp(MINUS_HALF * z * z)))

    return Activation(value, pull)


def _silu(number: Any) -> Activation:
    """z * sigmoid(z)."""
    exp = numbers(number).exp
    ONE = number(1)

    @verb
    def value(z):
        return z / (ONE + exp(-z))

    @verb
    def pull(z, dy):
        sigmoid = ONE / (ONE + exp(-z))
        return dy * (sigmoid * (ONE + z * (ONE - sigmoid)))

    return Activation(value, pull)
