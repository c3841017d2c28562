"""Functions by their code: whether two do the same, and copies with another global."""

from __future__ import annotations

from functools import update_wrapper
from types import CellType, CodeType, FunctionType
from typing import Any


def with_global(function: Any, name: str, value: Any) -> Any:
    """Return the same function with another value of a global, and the same decorators.

    Raises NotImplementedError for a decorator that is no function, or does not hold the decorated function.
    """
    if not isinstance(function, FunctionType):
        raise NotImplementedError(f"its forward is decorated, by a {type(function).__name__}, expected a function")
    inner = getattr(function, "__wrapped__", None)
    others, cells, within = function.__globals__, function.__closure__, None
    if inner is None:
        others = {**others, name: value}
        # torch.compile looks a global up in the module of this name, and would find theirs
        del others["__name__"]
    elif any(cell.cell_contents is inner for cell in cells or ()):
        within = with_global(inner, name, value)
        cells = tuple(CellType(within) if cell.cell_contents is inner else cell for cell in cells or ())
    else:
        raise NotImplementedError("its forward is decorated, by a function that does not hold it")
    made: Any = FunctionType(function.__code__, others, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(made, function)
    if within is None:
        del made.__wrapped__
    else:
        made.__wrapped__ = within
    return made


def same_methods(one: type, two: type, names: tuple[str, ...]) -> bool:
    """Whether two classes have the same code for these methods."""
    return all(same_code(getattr(one, name, None), getattr(two, name)) for name in names)


def same_code(one: Any, two: Any) -> bool:
    """Whether two functions have the same instructions, on the same names and constants; docstrings may differ.

    The functions that they decorate must be equal too.
    """

    def code_facts(function: Any) -> tuple[Any, ...]:
        code = code_of(function)
        constants = code.co_consts[1:] if function.__doc__ else code.co_consts
        defaults = (function.__defaults__, function.__kwdefaults__)
        inner = getattr(function, "__wrapped__", None)
        one = code.co_code, code.co_names, code.co_varnames, constants, defaults
        return one if inner is None else (*one, code_facts(inner))

    return isinstance(one, FunctionType) and isinstance(two, FunctionType) and code_facts(one) == code_facts(two)


def code_of(function: Any) -> CodeType:
    """Return a function's code; for anything without code, that of a function that does nothing."""
    return getattr(function, "__code__", _nothing.__code__)


def _nothing() -> None:
    pass
