"""Copy a function together with everything that it reads from outside: later changes do not affect the copy.

Copied are variables of the enclosing functions, globals, default values, called functions, arrays, lists, and the
attributes that it reads from modules and other objects. What was not copied does not exist for the copy: to read it
would raise an error, never give a later value.
"""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Iterator, Set
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from .source import code_facts, constant_facts

PLAIN = (bool, int, float, complex, str, bytes)
OF_CODE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the type was made by Python code, and can change
FROZEN = "__frozen__"  # a global of every copy
MISSING = object()
ATTRIBUTE, GLOBAL = ("LOAD_ATTR", "LOAD_METHOD"), ("LOAD_GLOBAL", "LOAD_NAME")
Path = tuple[str, ...]  # attributes read from a variable, each from the previous one
AS_IT_IS: Set[Path] = frozenset({()})


class Attributes(ModuleType):
    """Replaces a module or another object in a copy: the attributes that the function reads from it."""


OF_EVERY_MODULE = frozenset(vars(ModuleType("")))


def frozen(function: FunctionType) -> FunctionType:
    """Return the copy; a copy, or a function built from one, is returned as it is.

    Raises TypeError if it reads what no kernel can have, or changes what is not its own.
    """
    return function if FROZEN in function.__globals__ else _Copying().function(function)


# --- what a function reads from outside --------------------------------------------------------------


class Reads(NamedTuple):
    """The names that are not local, and the attributes read from each: () if a name is used directly."""

    cells: dict[str, set[Path]]
    globals: dict[str, set[Path]]
    attributes: frozenset[str]  # attributes read from anything


@lru_cache(maxsize=256)
def _reads(code: CodeType) -> Reads:
    """Collect what a function reads. Raises TypeError if it changes, or imports, what is not its own."""
    steps = list(_steps(code))
    _check_harmless(code, steps)
    found = Reads({}, {}, frozenset(step.argval for _, step in steps if step.opname in ATTRIBUTE))
    scope, name, path = found.globals, "", None
    for _, step in steps:
        if step.opname in ATTRIBUTE:
            path = None if path is None else (*path, step.argval)
            continue
        if path is not None:
            scope.setdefault(name, set()).add(path)
        path = None
        if step.opname in GLOBAL or step.opname == "LOAD_DEREF":
            scope = found.globals if step.opname in GLOBAL else found.cells
            name, path = step.argval, ()
    return found


def _steps(code: CodeType) -> Iterator[tuple[CodeType, dis.Instruction]]:
    """Yield the instructions of a function and of those inside it, each with its code object."""
    for step in dis.get_instructions(code):
        if step.opname not in ("EXTENDED_ARG", "PUSH_NULL", "NOP"):
            yield code, step
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _steps(inner)


def _check_harmless(code: CodeType, steps: list[tuple[CodeType, dis.Instruction]]) -> None:
    for where, step in steps:
        name, kind = step.argval, step.opname
        if kind == "IMPORT_NAME" and name.partition(".")[0] not in ("math", "numpy"):
            raise TypeError(f"{code.co_name} imports {name}, expected that this is done outside of it")
        to_cell = kind in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars and name in where.co_freevars
        if to_cell or kind in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise TypeError(f"{code.co_name} assigns to {name}, expected that it leaves what is not its own")


# --- the copy ----------------------------------------------------------------------------------------


class _Copying:
    """Makes one copy. `made`: functions and their copies, by the functions' ids: functions may call one another."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[FunctionType, FunctionType]] = {}

    def function(self, function: FunctionType) -> FunctionType:
        if id(function) in self.made:
            return self.made[id(function)][1]
        code, scope = function.__code__, function.__globals__
        cells = tuple(CellType() for _ in code.co_freevars)
        own_scope = {"__builtins__": function.__builtins__, "__name__": scope.get("__name__"), FROZEN: True}
        copy = FunctionType(code, own_scope, function.__name__, None, cells)
        self.made[id(function)] = function, copy
        copy.__dict__["reads"] = reads = _reads(code)
        for name, cell, own in zip(code.co_freevars, function.__closure__ or (), cells):
            if name in reads.cells and (value := content(cell)) is not MISSING:
                own.cell_contents = self.value(name, value, reads.cells[name], reads.attributes)
        for name, paths in reads.globals.items():
            if name in scope:
                own_scope[name] = self.value(name, scope[name], paths, reads.attributes)
        if function.__defaults__:
            copy.__defaults__ = self.value("default", function.__defaults__, AS_IT_IS, reads.attributes)
        if by_name := function.__kwdefaults__:
            parts = {name: self.value(name, value, AS_IT_IS, reads.attributes) for name, value in by_name.items()}
            copy.__kwdefaults__ = parts
        return copy

    def value(self, name: str, value: Any, paths: Set[Path], attributes: frozenset[str]) -> Any:
        """Copy a value, whose `paths` are used; where it is passed on as it is, `attributes` may be read."""
        if value is None or isinstance(value, PLAIN) or _is_number(value) or _is_fixed(value):
            return value
        if _is_array(value):
            return np.ndarray(value.shape, value.dtype, value.tobytes())  # on bytes, which are read-only
        if isinstance(value, (tuple, list)):
            parts = [self.value(name, part, AS_IT_IS, attributes) for part in value]
            if isinstance(value, list):
                return parts
            same = all(part is old for part, old in zip(parts, value))
            return value if same else getattr(value, "_make", tuple)(parts)  # _make: a named tuple
        if isinstance(value, FunctionType):
            return self.function(value)
        return self.attributes(name, value, paths, attributes)

    def attributes(self, name: str, value: Any, paths: Set[Path], mentioned: frozenset[str]) -> Attributes:
        """Return the replacement of an object."""
        wanted = {path[0] for path in paths if path} | (mentioned if () in paths else frozenset())
        copy = Attributes(value.__name__ if isinstance(value, ModuleType) else name)
        for attribute in sorted(wanted):
            part = getattr(value, attribute, MISSING)
            if part is not MISSING:
                further = {path[1:] for path in paths if path[:1] == (attribute,)}
                setattr(copy, attribute, self.value(f"{name}.{attribute}", part, further or AS_IT_IS, frozenset()))
        if not isinstance(value, ModuleType) and not any(_parts(copy)):
            raise TypeError(
                f"its variable {name} is of type {type(value).__name__}, "
                "expected a number, a string, a tuple, an array, a function or a module"
            )
        return copy


def _parts(attributes: Attributes) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in vars(attributes).items() if name not in OF_EVERY_MODULE)


def content(cell: CellType) -> Any:
    """Return the content of a cell; MISSING if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _is_number(value: Any) -> bool:
    return isinstance(value, np.generic) and not value.dtype.hasobject and not isinstance(value, np.void)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.dtype.hasobject and not isinstance(value, np.ma.MaskedArray)


def _is_fixed(value: Any) -> bool:
    """Whether it is a function or a type of Python or NumPy, which never change."""
    if isinstance(value, BuiltinFunctionType):  # it may be a method of some object
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    if isinstance(value, type):
        return not value.__flags__ & OF_CODE
    if isinstance(value, np.ufunc):  # it may be made from a Python function
        return any(getattr(sys.modules.get(name), value.__name__, None) is value for name in ("numpy", "scipy.special"))
    return isinstance(value, type(np.where))


# --- whether the copy is current ----------------------------------------------------------------------


def is_unchanged(function: FunctionType, copy: FunctionType, seen: tuple[FunctionType, ...] = ()) -> bool:
    """Whether a copy made now would equal this one, which was made from the function before."""
    code = function.__code__
    if code is not copy.__code__:
        return False
    if any(function is other for other in seen):  # it calls itself, or a function that calls it
        return True
    seen, reads = (*seen, function), copy.__dict__["reads"]
    for name, cell, kept in zip(code.co_freevars, function.__closure__ or (), copy.__closure__ or ()):
        if name in reads.cells and not is_same(content(cell), content(kept), seen):
            return False
    scope, own_scope = function.__globals__, copy.__globals__
    for name in reads.globals:
        if not is_same(scope.get(name, MISSING), own_scope.get(name, MISSING), seen):
            return False
    by_name, kept_by_name = function.__kwdefaults__ or {}, copy.__kwdefaults__ or {}
    return is_same(function.__defaults__, copy.__defaults__, seen) and (
        by_name.keys() == kept_by_name.keys()
        and all(is_same(by_name[name], kept_by_name[name], seen) for name in by_name)
    )


def is_same(value: Any, kept: Any, seen: tuple[FunctionType, ...] = ()) -> bool:
    """Whether a copy of the value would equal the earlier one."""
    kind = type(kept)
    if value is kept:
        return True
    if kind is Attributes:
        return all(is_same(getattr(value, name, MISSING), part, seen) for name, part in _parts(kept))
    if kind is np.ndarray:
        same_kind = _is_array(value) and value.shape == kept.shape and value.dtype == kept.dtype
        return same_kind and value.tobytes() == kept.base
    if type(value) is not kind:
        return False
    if kind is FunctionType:
        return is_unchanged(value, kept, seen)
    if isinstance(kept, (tuple, list)):
        return len(value) == len(kept) and all(is_same(one, other, seen) for one, other in zip(value, kept))
    return (isinstance(kept, PLAIN) or _is_number(kept)) and constant_facts(value) == constant_facts(kept)


# --- what a copy is, in words ------------------------------------------------------------------------


def facts(value: Any, seen: tuple[FunctionType, ...] = ()) -> str:
    """Describe all that a copy does, or a value in it, as text that is the same in every process."""
    if value is None or isinstance(value, PLAIN):
        return constant_facts(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype.str}{value.shape}:{hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}{getattr(value, '_fields', '')}{[facts(part, seen) for part in value]}"
    if isinstance(value, Attributes):
        return f"{value.__name__} with {[(name, facts(part, seen)) for name, part in _parts(value)]}"
    if isinstance(value, FunctionType):
        return _function_facts(value, seen)
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    return f"{getattr(value, '__module__', None)}.{value.__name__}"


def _function_facts(function: FunctionType, seen: tuple[FunctionType, ...]) -> str:
    if function in seen:
        return f"function {seen.index(function)}"  # it calls itself, or a function that calls it
    code, scope, seen = function.__code__, function.__globals__, (*seen, function)
    values = [("default", value) for value in function.__defaults__ or ()]
    values += (function.__kwdefaults__ or {}).items()
    values += zip(code.co_freevars, map(content, function.__closure__ or ()))
    values += [(name, scope[name]) for name in _reads(code).globals if name in scope]
    return "\n".join(
        [code_facts(code), *(f"{name}={facts(value, seen)}" for name, value in values if value is not MISSING)]
    )


# --- where a value is from ---------------------------------------------------------------------------

Place = tuple[tuple[str, Any], ...]  # steps from a function: ("cell", 0), ("global", "SLOPES"), ("item", 2), ...


def leaves(copy: FunctionType) -> Iterator[tuple[Place, Any]]:
    """Return all values that a copy has of its function's variables, with their places; of a tuple its items."""
    return _leaves(copy, (), ())


def _leaves(value: Any, place: Place, seen: tuple[FunctionType, ...]) -> Iterator[tuple[Place, Any]]:
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(value, FunctionType) and value not in seen:
        seen, scope = (*seen, value), value.__globals__
        parts += [("default", index, part) for index, part in enumerate(value.__defaults__ or ())]
        parts += [("keyword", name, part) for name, part in (value.__kwdefaults__ or {}).items()]
        parts += [("cell", index, content(cell)) for index, cell in enumerate(value.__closure__ or ())]
        parts += [("global", name, scope[name]) for name in _reads(value.__code__).globals if name in scope]
    elif isinstance(value, Attributes):
        parts += [("attribute", name, part) for name, part in _parts(value)]
    elif isinstance(value, (tuple, list)):
        parts += [("item", index, part) for index, part in enumerate(value)]
    if place and value is not MISSING and not isinstance(value, (Attributes, tuple, list)):
        yield place, value
    for kind, key, part in parts:
        yield from _leaves(part, (*place, (kind, key)), seen)
