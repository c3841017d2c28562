"""What comes upon a product, as verbs on numbers: the value, and what the gradient of the value makes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import pi, sqrt
from typing import Any

from ..backend import Namespace, verb
from ..tile.numbers import numbers


class Activation(Namespace):
    """The verbs of one activation."""

    value: Callable[..., Any]  # (z) -> act(z)
    pull: Callable[..., Any]  # (z, dy) -> act'(z) * dy


@cache
def activation(name: str | None, number: Any) -> Activation:
    """Of "relu", "gelu" or "silu", or of None, in arithmetic of type f32 or f64."""
    if name is None:
        return Activation(value=_same, pull=_same_gradient)
    return {"relu": _relu, "gelu": _gelu, "silu": _silu}[name](number)


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

    return Activation(value=value, pull=pull)


def _gelu(number: Any) -> Activation:
    """z * Phi(z), Phi(z) = erfc(-z / sqrt(2)) / 2: where Phi is tiny, 1 + erf would have lost it."""
    num = numbers(number)
    HALF, MINUS_HALF = number(0.5), number(-0.5)
    SCALE, DENSITY = number(-1 / sqrt(2)), number(1 / sqrt(2 * pi))

    @verb
    def value(z):
        return z * (HALF * num.erfc(z * SCALE))

    @verb
    def pull(z, dy):
        return dy * (HALF * num.erfc(z * SCALE) + z * (DENSITY * num.exp(MINUS_HALF * z * z)))

    return Activation(value=value, pull=pull)


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

    return Activation(value=value, pull=pull)
