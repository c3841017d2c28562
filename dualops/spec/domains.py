"""Domains of parameters: functions from a value to its normal form, which raise ValueError or TypeError.

A normal form is a plain Python number, truth value or string. NumPy's scalars would promote arrays (np.float64 is a
float, and turns a float32 array into float64), and differ from Python's wherever a type is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np

LONGEST_SHOWN = 200  # characters


def shown(value: Any) -> str:
    """Format a value for an error's message: its repr on one line, shortened."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # some values have no repr: 10**5000, or an object whose repr raises
        text = f"a {type(value).__module__}.{type(value).__qualname__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def boolean(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError("expected True or False")
    return bool(value)


def integer(value: Any) -> int:
    if isinstance(value, (bool, np.bool_, type)) or getattr(value, "ndim", 0) or not hasattr(value, "__index__"):
        raise TypeError("expected an integer")
    try:
        return value.__index__()
    except TypeError:  # an array of floats
        raise TypeError("expected an integer") from None


def length(value: Any) -> Any:
    """A size: an integer of 0 or more. A symbolic integer of a traced call is returned unchanged."""
    stands_for_one = hasattr(value, "__index__") and not (isinstance(value, Integral) or hasattr(value, "dtype"))
    number = value if stands_for_one else integer(value)
    if number < 0:
        raise ValueError("expected 0 or more")
    return number


def length_or_all(value: Any) -> Any:
    """A length, or None for the number of all tokens."""
    return None if value is None else length(value)


def finite(value: Any) -> float:
    if isinstance(value, (bool, np.bool_, str, bytes, type)) or getattr(value, "ndim", 0):
        raise TypeError("expected a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError("expected a number") from None
    except OverflowError:
        raise ValueError("expected a finite number") from None
    if not np.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def non_negative(value: Any) -> float:
    if (number := finite(value)) < 0:
        raise ValueError("expected 0 or more")
    return number


def optional(domain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the domain that accepts None in addition to the values of `domain`."""
    return lambda value: None if value is None else domain(value)


def one_of(*choices: Any) -> Callable[[Any], Any]:
    def domain(value: Any) -> Any:
        for choice in choices:
            if value is choice or (isinstance(value, str) and value == choice):
                return choice
        raise ValueError(f"expected one of {', '.join(map(repr, choices))}")

    return domain
