"""A user's function of numbers: checked, identified by everything it depends on, and differentiable."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from functools import cached_property
from inspect import CO_VARARGS
from numbers import Real
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from .derivative import slope_of
from .frozen import facts, frozen, is_unchanged

DIGITS = 24  # of a digest


class UserFunction:
    """A Python function of `parameters`, equal to any other that does the same.

    It is a copy: variables from outside keep the values that they have when this is made (see `frozen`). Raises
    TypeError for a variable that no kernel can have. Allowed are numbers, strings, tuples and arrays of them, functions
    and modules.
    """

    def __init__(self, function: FunctionType, parameters: tuple[str, ...], derivative: UserFunction | None = None):
        self.function, self.parameters, self._given = frozen(function), parameters, derivative
        text = "\n".join([function.__name__, *parameters, repr(derivative), facts(self.function)])
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:DIGITS]

    @cached_property
    def derivative(self) -> UserFunction:
        """Return d result / d first parameter, a function of the same parameters.

        Raises TypeError if it can't be generated and none was given.
        """
        return self._given or UserFunction(slope_of(self.function, len(self.parameters)), self.parameters)

    def __repr__(self) -> str:
        return f"{self.function.__name__}#{self.digest}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserFunction) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


# --- the domain of parameters that are functions -----------------------------------------------------


def function_of(*parameters: str) -> Callable[[Any], UserFunction]:
    """Return the domain of Python functions with these positional parameters: integers, and numbers named "score".

    If the first is "score", a pair (function, derivative) is accepted too. A function is called once, with score 0.5
    and zeros. As long as nothing that it reads has changed, it maps to the same UserFunction, found in microseconds.
    """

    def domain(value: Any) -> UserFunction:
        if isinstance(value, UserFunction):
            if value.parameters != parameters:
                raise TypeError(f"a function of ({', '.join(value.parameters)}), {expected}")
            return value
        if isinstance(value, tuple) and pairs:
            if len(value) != 2:
                raise TypeError(f"a tuple of {len(value)}, expected a function or a pair (function, derivative)")
            return _user(value[0], parameters, derivative=_user(value[1], parameters, "its derivative: "))
        return _user(value, parameters)

    pairs = parameters[0] == "score"
    expected = f"expected a function of ({', '.join(parameters)})"
    return domain


# the last UserFunctions of a function
_last: WeakKeyDictionary[FunctionType, dict[Any, UserFunction]] = WeakKeyDictionary()
_alive: WeakValueDictionary[Any, UserFunction] = WeakValueDictionary()  # by what they do and where their source is


def _user(
    function: Any, parameters: tuple[str, ...], which: str = "", derivative: UserFunction | None = None
) -> UserFunction:
    """Return the function with its current values, if a call with sample numbers gives a valid result."""
    last = _last.get(function, {}) if isinstance(function, FunctionType) else {}
    user = last.get((parameters, derivative))
    if user is None or not is_unchanged(function, user.function):
        _check(function, parameters, which)
        made = UserFunction(function, parameters, derivative)
        code = function.__code__
        place = (made.digest, code.co_filename, code.co_firstlineno)
        user = _alive.get(place)
        if user is None:
            _try(made.function, parameters, which)
            user = _alive[place] = made
        _last[function] = {**last, (parameters, derivative): user}
    return user


def _check(function: Any, parameters: tuple[str, ...], which: str) -> None:
    expected = f"of ({', '.join(parameters)})"
    if not isinstance(function, FunctionType):
        raise TypeError(
            f"{which}of type {type(function).__name__}, expected a Python function {expected}, made by def or lambda"
        )
    code, count = function.__code__, len(parameters)
    needed = code.co_argcount - len(function.__defaults__ or ())
    if not needed <= count or not (count <= code.co_argcount or code.co_flags & CO_VARARGS):
        raise TypeError(f"{which}a function of {code.co_argcount} arguments, expected one {expected}")
    if code.co_kwonlyargcount > len(function.__kwdefaults__ or {}):
        raise TypeError(f"{which}a function with arguments that only have names, expected one {expected}")


def _try(function: FunctionType, parameters: tuple[str, ...], which: str) -> None:
    # NumPy's numbers: as in a kernel, a division by zero is infinite, and ~ inverts a truth value
    sample = [np.float64(0.5) if name == "score" else np.int64(0) for name in parameters]
    try:
        with np.errstate(all="ignore"):
            result = function(*sample)
    except Exception as error:
        raise ValueError(f"{which}for {_arguments_text(parameters, sample)} {_said(error, function)}") from error
    wanted, kind = ("a number", (Real, np.number)) if parameters[0] == "score" else ("True or False", (bool, np.bool_))
    if not isinstance(result, kind) or isinstance(result, complex):
        raise ValueError(f"{which}for {_arguments_text(parameters, sample)} it gives {result!r}, expected {wanted}")


def _arguments_text(parameters: tuple[str, ...], sample: list[Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(parameters, sample, strict=True))


def _said(error: Exception, function: FunctionType) -> str:
    """Describe an exception, and the line of the user's file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == function.__code__.co_filename]
    line = own[-1].lineno if own else function.__code__.co_firstlineno
    return f"it raises {type(error).__name__}: {error} ({function.__code__.co_filename}, line {line})"
