"""What torch.compile must know of users' functions: a graph has them as texts, which are made when it is compiled.

Numbers and strings that a function reads from outside are compared at every call of the compiled one, and functions
that it calls told apart, so that others compile again. (That 0.0 became -0.0 torch sees from 2.15 on.) Of anything else
torch.compile sees where it lies, not whether it was changed there: arrays, and all that a function reads which was made
inside the compiled one. That is looked at when the graph runs, and a change is an error.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch

from ..spec.attention.frozen import Place, frozen, is_same, leaves

Made = TypeVar("Made", bound=Callable[..., Any])
Value = tuple[Place, Any]

COMPARED = (type(None), bool, int, float, str)


def constant(function: Made) -> Made:
    """Let torch.compile call a function when it compiles, and keep what it gives, in place of reading along.

    This is torch.compiler.assume_constant_result without its import of torch._dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def past_compilation(function: Made) -> Made:
    """The same function, at which a graph of torch.compile ends, and nothing in it is compiled.

    This is torch.compiler.disable without its import of torch._dynamo, which is left to who compiles.
    """

    @constant
    @cache
    def disabled() -> Any:
        return torch.compiler.disable(function)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **named)

    return call  # type: ignore[return-value]


# --- while torch.compile reads along -----------------------------------------------------------------


def depend_on(function: Any) -> bool:
    """Have torch.compile compile again where the function reads other values. Whether it is one from outside."""
    if _identity(function) != _identity(function):
        return False
    compared, told_apart, held = _read_by(function)
    for place, known in compared:
        value = _at(function, place)
        if value != known and known == known:
            raise RuntimeError("a variable that a function reads was changed in what is compiled")
    for place in told_apart:
        callable(_at(function, place))
    for place in held:
        id(_at(function, place))
    return True


def _at(function: Any, place: Place) -> Any:
    """What a function reads there now; or the cell, or the default values, that hold it."""
    value = function
    for kind, key in place:
        if kind == "cell":
            value = value.__closure__[key].cell_contents
        elif kind == "global":
            value = value.__globals__[key]
        elif kind == "default":
            value = value.__defaults__[key]
        elif kind == "keyword":
            value = value.__kwdefaults__[key]
        elif kind == "item":
            value = value[key]
        elif kind == "attribute":
            value = getattr(value, key)
        elif kind == "holder cell":
            value = value.__closure__[key]
        elif kind == "holder default":
            value = value.__defaults__
        elif kind == "holder keyword":
            value = value.__kwdefaults__
    return value


_last_seen: deque[Any] = deque(maxlen=2)  # so that two have two ids


@constant
def _identity(function: Any) -> int:
    """Another one each time for a function that was made inside: torch.compile makes it anew for each question."""
    _last_seen.append(function)
    return id(function)


@constant
def _read_by(function: Any) -> tuple[tuple[Value, ...], tuple[Place, ...], tuple[Place, ...]]:
    """Numbers and strings with their places, the places of functions, and those of what holds anything else."""
    read = [*_leaves(function)]
    compared = tuple((place, value) for place, value in read if type(value) in COMPARED)
    told_apart = tuple(place for place, value in read if callable(value))
    held = dict.fromkeys(holder for place, value in read if not _is_guarded(value) and (holder := _holder(place)))
    return compared, told_apart, tuple(held)


def _leaves(function: Any) -> Iterable[Value]:
    try:
        return leaves(frozen(function)) if isinstance(function, FunctionType) else ()
    except TypeError:  # it will be refused
        return ()


def _is_guarded(value: Any) -> bool:
    return type(value) in COMPARED or callable(value)


def _holder(place: Place) -> Place:
    """The innermost cell or tuple of defaults on the way to a place. What is on no such way hangs on a module."""
    for index in reversed(range(len(place))):
        kind, key = place[index]
        if kind in ("cell", "default", "keyword"):
            return (*place[:index], (f"holder {kind}", key))
    return ()


# --- while a graph runs ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dependence:
    """A value that a graph was compiled for, where it was found, and a copy of it."""

    function: Any
    place: Place
    kept: Any

    def check(self) -> None:
        """RuntimeError where there is another value now."""
        try:
            same = is_same(_at(self.function, self.place), self.kept)
        except (AttributeError, LookupError, TypeError, ValueError):  # or none
            same = False
        if not same:
            raise RuntimeError(
                f"{_name(self.function, self.place)}, which {self.function.__name__} reads, has changed since it was "
                "compiled, and torch.compile can't tell; give it another function for other values"
            )


def dependences(function: Any, from_outside: bool) -> Iterator[Dependence]:
    """Those that `depend_on` could not make torch.compile see."""
    for place, value in _leaves(function):
        if not (from_outside and _is_guarded(value)):
            yield Dependence(function, place, value)


def _name(function: Any, place: Place) -> str:
    """What the innermost function on the way to a place calls the variable."""
    named = max(index for index, (kind, _) in enumerate(place) if kind in ("cell", "global", "default", "keyword"))
    kind, key = place[named]
    if kind == "cell":
        return _at(function, place[:named]).__code__.co_freevars[key]
    return "a default value" if kind == "default" else key
