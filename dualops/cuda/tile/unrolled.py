"""Local arrays, and loops over them that are unrolled when a kernel is built.

The compiler does not unroll a long loop, and then the arrays that the loop indexes are in local memory, not in
registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from ..compiler.backend import cuda, f32, verb

Verb = Callable[[Any, Any, Any, Any], None]


def nothing(count: int) -> Callable[..., None]:
    """Return the verb of `count` parameters that does nothing."""
    return verb(_calls(count, ())(None))


def one_after_another(verbs: Sequence[Verb]) -> Verb:
    """Return a verb that calls these verbs in order, each with the same four arguments."""
    if not verbs:
        return nothing(4)
    if len(verbs) == 1:
        return verbs[0]
    half = len(verbs) // 2
    first, second = one_after_another(verbs[:half]), one_after_another(verbs[half:])

    @verb
    def both(a, b, c, d):
        first(a, b, c, d)
        second(a, b, c, d)

    return both


def unrolled(numbers: Iterable[int | tuple[int, ...]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a verb whose last parameters are constants. The new verb lacks these parameters. It calls
    the old one for each of `numbers` in order, each a number or a tuple of numbers. They can't index a tuple.
    """
    rows = tuple(each if isinstance(each, tuple) else (each,) for each in numbers)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        count = function.__code__.co_argcount - (len(rows[0]) if rows else 1)
        every = verb(_calls(count, rows)(function))
        every.__name__, every.__qualname__, every.__doc__ = function.__name__, function.__qualname__, function.__doc__
        return every

    return decorate


@cache
def _calls(count: int, rows: tuple[tuple[int, ...], ...]) -> Callable[..., Any]:
    """Return the function (verb) -> the verb of `count` parameters that calls it with them and each row."""
    names = [f"argument_{n}" for n in range(count)]
    calls = [f"        verb({', '.join([*names, *map(str, row)])})" for row in rows] or ["        pass"]
    text = ["def made(verb):", f"    def every({', '.join(names)}):", *calls, "    return every"]
    scope: dict[str, Any] = {"__name__": __name__}
    exec("\n".join(text), scope)
    return scope["made"]


def local_array(size: int, number: Any) -> Callable[..., Any]:
    """Return the verb () -> a local array of `size` numbers of this type."""

    @verb
    def make():
        return cuda.local.array(size, number)

    return make


def zeros(size: int) -> Callable[..., Any]:
    """Return the verb () -> a local array of `size` sums, all 0."""
    ZERO = f32(0)

    @verb
    def make():
        sums = cuda.local.array(size, f32)
        for e in range(size):
            sums[e] = ZERO
        return sums

    return make
