"""A user's function of numbers: checked, named by all that it depends on, and differentiable."""

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

    It is a copy: variables from outside count as they are when this is made (see `frozen`). TypeError where one of them
    is none of those that a kernel can have: numbers, strings, tuples and arrays of them, functions and modules.
    """

    def __init__(self, function: FunctionType, parameters: tuple[str, ...], derivative: UserFunction | None = None):
        self.function, self.parameters, self._given = frozen(function), parameters, derivative
        told = "\n".join([function.__name__, *parameters, repr(derivative), facts(self.function)])
        self.digest = hashlib.sha256(told.encode()).hexdigest()[:DIGITS]

    @cached_property
    def derivative(self) -> UserFunction:
        """d result / d first parameter, a function of the same parameters.

        TypeError where it can't be made and none was given.
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
    """The domain of Python functions that take these parameters, by position: integers, and numbers named "score".

    Where the first is "score", also a pair (function, derivative). A function is called once, with score 0.5 and zeros.
    As long as nothing that it reads has changed, it stands for the same UserFunction, which takes microseconds to find.
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


_last: WeakKeyDictionary[FunctionType, dict[Any, UserFunction]] = WeakKeyDictionary()  # what a function stood for
_alive: WeakValueDictionary[Any, UserFunction] = WeakValueDictionary()  # by what they do, and the place of their source


def _user(
    function: Any, parameters: tuple[str, ...], which: str = "", derivative: UserFunction | None = None
) -> UserFunction:
    """The function with the values of now, if a call with sample numbers gives what it should."""
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
    told = f"of ({', '.join(parameters)})"
    if not isinstance(function, FunctionType):
        raise TypeError(
            f"{which}of type {type(function).__name__}, expected a Python function {told}, made by def or lambda"
        )
    code, count = function.__code__, len(parameters)
    needed = code.co_argcount - len(function.__defaults__ or ())
    if not needed <= count or not (count <= code.co_argcount or code.co_flags & CO_VARARGS):
        raise TypeError(f"{which}a function of {code.co_argcount} arguments, expected one {told}")
    if code.co_kwonlyargcount > len(function.__kwdefaults__ or {}):
        raise TypeError(f"{which}a function with arguments that only have names, expected one {told}")


def _try(function: FunctionType, parameters: tuple[str, ...], which: str) -> None:
    # NumPy's numbers: as in a kernel, what is divided by zero is infinite, and ~ turns a truth value round
    sample = [np.float64(0.5) if name == "score" else np.int64(0) for name in parameters]
    try:
        with np.errstate(all="ignore"):
            result = function(*sample)
    except Exception as error:
        raise ValueError(f"{which}for {_told(parameters, sample)} {_said(error, function)}") from error
    wanted, kind = ("a number", (Real, np.number)) if parameters[0] == "score" else ("True or False", (bool, np.bool_))
    if not isinstance(result, kind) or isinstance(result, complex):
        raise ValueError(f"{which}for {_told(parameters, sample)} it gives {result!r}, expected {wanted}")


def _told(parameters: tuple[str, ...], sample: list[Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(parameters, sample, strict=True))


def _said(error: Exception, function: FunctionType) -> str:
    """What an exception said, and at which line of the user's file."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == function.__code__.co_filename]
    line = own[-1].lineno if own else function.__code__.co_firstlineno
    return f"it raises {type(error).__name__}: {error} ({function.__code__.co_filename}, line {line})"
