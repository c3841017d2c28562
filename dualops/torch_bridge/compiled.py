"""Users' functions under torch.compile: a graph has them as texts, which are made when it is compiled.

Numbers and strings that a function reads from outside become guards, and so do the identities of functions that it
calls: other values compile again. (torch sees that 0.0 became -0.0 from 2.15 on.) Other values can't be guarded, since
torch.compile sees only their identity. These are arrays, and everything that a function reads if it is made inside the
compiled function. They are compared when the graph runs, and a change raises an error.
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
    """Have torch.compile call a function at compile time and keep its result, instead of tracing it.

    This is torch.compiler.assume_constant_result without its import of torch._dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def past_compilation(function: Made) -> Made:
    """Return the function as a graph break: torch.compile compiles nothing in it.

    This is torch.compiler.disable without its import of torch._dynamo, which only compiling code needs.
    """

    @constant
    @cache
    def disabled() -> Any:
        return torch.compiler.disable(function)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **named)

    return call  # type: ignore[return-value]


# --- while torch.compile traces -------------------------------------------------------------------------


def depend_on(function: Any) -> bool:
    """Have torch.compile compile again if the function reads other values. Returns whether it was made outside."""
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
    """Return what a function reads at a place now; or the cell, or the defaults, that hold it."""
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


_last_seen: deque[Any] = deque(maxlen=2)  # two entries, so that consecutive ones have different ids


@constant
def _identity(function: Any) -> int:
    """Return a new identity at each call for a function made inside: torch.compile makes it again for each query."""
    _last_seen.append(function)
    return id(function)


@constant
def _read_by(function: Any) -> tuple[tuple[Value, ...], tuple[Place, ...], tuple[Place, ...]]:
    """Return numbers and strings with their places, places of functions, and those of holders of anything else."""
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
    """Return the innermost cell or tuple of defaults on the way to a place, if any; other values belong to modules."""
    for index in reversed(range(len(place))):
        kind, key = place[index]
        if kind in ("cell", "default", "keyword"):
            return (*place[:index], (f"holder {kind}", key))
    return ()


# --- while a graph runs --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dependence:
    """A value that a graph was compiled for, its place, and a copy of it."""

    function: Any
    place: Place
    kept: Any

    def check(self) -> None:
        """Raise RuntimeError if the value has changed."""
        try:
            same = is_same(_at(self.function, self.place), self.kept)
        except (AttributeError, LookupError, TypeError, ValueError):  # or it no longer exists
            same = False
        if not same:
            raise RuntimeError(
                f"{_name(self.function, self.place)}, which {self.function.__name__} reads, has changed since it was "
                "compiled, and torch.compile can't tell; give it another function for other values"
            )


def dependences(function: Any, from_outside: bool) -> Iterator[Dependence]:
    """Yield the values that `depend_on` could not turn into guards."""
    for place, value in _leaves(function):
        if not (from_outside and _is_guarded(value)):
            yield Dependence(function, place, value)


def _name(function: Any, place: Place) -> str:
    """Return the name of a place's variable in the innermost function."""
    named = max(index for index, (kind, _) in enumerate(place) if kind in ("cell", "global", "default", "keyword"))
    kind, key = place[named]
    if kind == "cell":
        return _at(function, place[:named]).__code__.co_freevars[key]
    return "a default value" if kind == "default" else key
