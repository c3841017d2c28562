"""The functions of math, NumPy and Python that a user's function may call, and what a kernel runs for each."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..compiler.backend import SIMULATED, verb


class Kind(IntEnum):
    """The kind of a value. An operation on two kinds has the later one."""

    NOTHING = 0  # not known yet
    BOOL = 1
    INT = 2
    FLOAT = 3


BOOL, INT, FLOAT = Kind.BOOL, Kind.INT, Kind.FLOAT

# names of math's functions of floats
OF_ONE = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan")
OF_ONE += ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "gamma", "lgamma")
OF_TWO = ("atan2", "hypot", "fmod", "copysign")
TESTS = ("isnan", "isinf", "isfinite")
TO_WHOLE = ("floor", "ceil", "trunc")
IN_NUMPY = {name: f"arc{name[1:]}" for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2")}


class Call(NamedTuple):
    """A function that a kernel calls, its number of float arguments, and the kind of its result."""

    implementation: Any
    takes: int
    kind: Kind


def _in_numpy(name: str) -> Any:
    return getattr(np, IN_NUMPY.get(name, name), None)


def _implementation(name: str) -> Any:
    """Return math's function, which Numba compiles for its argument's type; in the simulator NumPy's, which never
    raises."""
    return (_in_numpy(name) if SIMULATED else None) or getattr(math, name)


def _of_floats() -> dict[Any, Call]:
    found = {}
    for names, takes, kind in ((OF_ONE, 1, FLOAT), (OF_TWO, 2, FLOAT), (TESTS, 1, BOOL)):
        for name in names:
            call = Call(_implementation(name), takes, kind)
            found |= {getattr(math, name): call, _in_numpy(name): call}
    found.pop(None)  # functions that NumPy lacks
    return found


FUNCTIONS = _of_floats()
# rounding to a whole number: what a kernel calls (`round` stands for `nearest`), and the kind of the result
ROUNDINGS: dict[Any, tuple[Any, Kind]] = {getattr(math, name): (_implementation(name), INT) for name in TO_WHOLE}
ROUNDINGS |= {getattr(np, name): (_implementation(name), FLOAT) for name in TO_WHOLE}
ROUNDINGS |= {round: (round, INT), np.round: (round, FLOAT), np.rint: (round, FLOAT)}
CONVERSIONS: dict[Any, Kind] = {float: FLOAT, np.float32: FLOAT, np.float64: FLOAT, bool: BOOL, np.bool_: BOOL}
CONVERSIONS |= {int: INT, np.int32: INT, np.int64: INT}
EXTREMES: dict[Any, Any] = {min: min, np.minimum: min, max: max, np.maximum: max}
LOGICAL: dict[Any, type[ast.boolop]] = {np.logical_and: ast.And, np.logical_or: ast.Or}


@cache
def sign(number: Any) -> Callable[..., Any]:
    """Return a verb for the sign: 1, -1, or the number itself if it is 0 or NaN."""
    ZERO, ONE = number(0), number(1)

    @verb
    def sign(x):
        return ONE if x > ZERO else -ONE if x < ZERO else x

    return sign


@cache
def nearest(number: Any) -> Callable[..., Any]:
    """Return a verb that rounds to the nearest whole number, ties to even."""
    HALF, ONE, TWO = number(0.5), number(1), number(2)
    floor = _implementation("floor")

    @verb
    def nearest(x):
        below = number(floor(x))
        rest = x - below
        return below + ONE if rest > HALF or (rest == HALF and below % TWO == ONE) else below

    return nearest


@verb
def power(base, exponent):
    """Return an integer to a nonnegative integer power."""
    result = base * 0 + 1
    for _ in range(exponent):
        result = result * base
    return result
