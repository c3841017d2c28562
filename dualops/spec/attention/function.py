"""A user's function of numbers: checked, named by all that it depends on, and differentiable."""

from __future__ import annotations

import dis
import hashlib
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from inspect import CO_VARARGS
from numbers import Real
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from .derivative import slope_of
from .source import code_facts, constant_facts

DIGITS = 24  # of a digest
PLAIN = (bool, int, float, complex, str, bytes)


class UserFunction:
    """A Python function of `parameters`, equal to any other that does the same.

    Variables from outside count as they are when this is made. TypeError where one of them is none of those that a
    kernel can have: numbers, strings, tuples and arrays of them, functions and modules.
    """

    def __init__(self, function: FunctionType, parameters: tuple[str, ...], derivative: UserFunction | None = None):
        self.function, self.parameters, self._given = function, parameters, derivative
        told = "\n".join([function.__name__, *parameters, repr(derivative), _function_facts(function, ())])
        self.digest = hashlib.sha256(told.encode()).hexdigest()[:DIGITS]

    @cached_property
    def derivative(self) -> UserFunction:
        """d result / d first parameter, a function of the same parameters.

        TypeError where it can't be made and none was given.
        """
        return self._given or _derivative(self, id(self.function.__globals__))

    def __repr__(self) -> str:
        return f"{self.function.__name__}#{self.digest}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserFunction) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@lru_cache(maxsize=128)
def _derivative(user: UserFunction, where: int) -> UserFunction:
    """Kept for equal functions of the same module, whose globals a derivative reads."""
    return UserFunction(slope_of(user.function, len(user.parameters)), user.parameters)


# --- what a function depends on ----------------------------------------------------------------------


def _function_facts(function: FunctionType, seen: tuple[int, ...]) -> str:
    """Bytecode, default values, and the values of all other variables, the same in every process."""
    if id(function) in seen:
        return f"function {seen.index(id(function))}"  # it calls itself, or what calls it
    seen = (*seen, id(function))
    facts = [code_facts(function.__code__)]
    facts += [_value_facts("a default", value, seen) for value in function.__defaults__ or ()]
    facts += [f"{name}={_value_facts(name, value, seen)}" for name, value in (function.__kwdefaults__ or {}).items()]
    facts += [f"{name}={_value_facts(name, value, seen)}" for name, value in _outside(function)]
    return "\n".join(facts)


def _outside(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Variables from outside that a function reads, of modules what it takes from them."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for is_global, name, *attributes in _names_read(function.__code__):
        if is_global and name in function.__globals__:
            value = function.__globals__[name]
        elif not is_global and name in cells:
            try:
                value = cells[name].cell_contents
            except ValueError:  # as yet unassigned
                continue
        else:
            continue  # Python's own, or of a function inside it, or a mistake that a call will show
        for attribute in attributes:
            part = getattr(value, attribute, None)
            if part is None or not (isinstance(value, ModuleType) or isinstance(part, PLAIN)):
                break
            name, value = f"{name}.{attribute}", part
        yield name, value


@lru_cache(maxsize=256)
def _names_read(code: CodeType) -> tuple[tuple[Any, ...], ...]:
    """(whether it is a global, name, attributes that are taken of it at once, ...) for all names that aren't locals."""
    found: list[tuple[Any, ...]] = []
    following = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE"):
            found.append((instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"), instruction.argval))
            following = True
        elif following and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found[-1] += (instruction.argval,)
        else:
            following = False
    inner = [names for constant in code.co_consts if isinstance(constant, CodeType) for names in _names_read(constant)]
    return tuple(dict.fromkeys([*found, *inner]))


def _value_facts(name: str, value: Any, seen: tuple[int, ...]) -> str:
    if value is None or isinstance(value, PLAIN):
        return constant_facts(value)
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return f"{value.dtype.str}{value.shape}:{hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}{[_value_facts(name, part, seen) for part in value]}"
    if isinstance(value, FunctionType):
        return _function_facts(value, seen)
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (BuiltinFunctionType, type, np.ufunc)) or _is_importable(value):
        return f"{getattr(value, '__module__', None)}.{getattr(value, '__name__', None)}"
    raise TypeError(
        f"its variable {name} is of type {type(value).__name__}, "
        "expected a number, a string, a tuple, an array, a function or a module"
    )


def _is_importable(value: Any) -> bool:
    """Whether its module and its name say what it is, as with NumPy's functions."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return module is not None and getattr(module, getattr(value, "__name__", ""), None) is value


# --- the domain of parameters that are functions -----------------------------------------------------


def function_of(*parameters: str) -> Callable[[Any], UserFunction]:
    """The domain of Python functions that take these parameters, by position: integers, and numbers named "score".

    Where the first is "score", also a pair (function, derivative). Functions are called once, with score 0.5 and zeros.
    """

    def domain(value: Any) -> UserFunction:
        if isinstance(value, UserFunction):
            if value.parameters != parameters:
                raise TypeError(f"a function of ({', '.join(value.parameters)}), {expected}")
            return value
        if isinstance(value, tuple) and pairs:
            if len(value) != 2:
                raise TypeError(f"a tuple of {len(value)}, expected a function or a pair (function, derivative)")
            function, derivative = value
            _check(derivative, parameters, "its derivative: ")
            return UserFunction(_check(function, parameters), parameters, UserFunction(derivative, parameters))
        return UserFunction(_check(value, parameters), parameters)

    pairs = parameters[0] == "score"
    expected = f"expected a function of ({', '.join(parameters)})"
    return domain


def _check(function: Any, parameters: tuple[str, ...], which: str = "") -> FunctionType:
    """The function, if a call with sample numbers gives what it should."""
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
    # NumPy's numbers: as in a kernel, what is divided by zero is infinite, and ~ turns a truth value round
    sample = [np.float64(0.5) if name == "score" else np.int64(0) for name in parameters]
    try:
        with np.errstate(all="ignore"):
            result = function(*sample)
    except Exception as error:
        raise ValueError(f"{which}for {_named(parameters, sample)} {_said(error, function)}") from error
    wanted, kind = ("a number", (Real, np.number)) if parameters[0] == "score" else ("True or False", (bool, np.bool_))
    if not isinstance(result, kind) or isinstance(result, complex):
        raise ValueError(f"{which}for {_named(parameters, sample)} it gives {result!r}, expected {wanted}")
    return function


def _named(parameters: tuple[str, ...], sample: list[Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(parameters, sample, strict=True))


def _said(error: Exception, function: FunctionType) -> str:
    """What an exception said, and at which line of the user's file."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == function.__code__.co_filename]
    line = own[-1].lineno if own else function.__code__.co_firstlineno
    return f"it raises {type(error).__name__}: {error} ({function.__code__.co_filename}, line {line})"
