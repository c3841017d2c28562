"""What a kernel asks of a noun or of a record, `config.warps` or `variant.dw`, is a constant like any plain name.

Numba follows attributes of modules alone, and knows no constant in them that may size an array or decide an `if` while
compiling. Here every attribute of a Namespace, of a frozen dataclass (its properties too) and of a NamedTuple that the
function closes over is replaced by its value before anything else is done, and a product or sum of two such integers by
the result. A Python function becomes Numba's, to be inlined.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import is_dataclass
from types import FunctionType, ModuleType
from typing import Any

from numba import cuda
from numba.cuda.core import ir

from .names import names_read

FOLDED = {operator.add, operator.sub, operator.mul, operator.floordiv}
INLINED = "_dualops_inlined"  # a function's attribute


def settle_members(function: Any) -> None:
    """Replace them in the IR of a function."""
    definitions = function._definitions
    settled, uses = False, Counter[str]()
    for block in function.blocks.values():
        for statement in block.body:
            if type(statement) is ir.Assign:
                value = statement.value
                found = _settled(value, definitions) if type(value) is ir.Expr else None
                if found is not None:
                    statement.value = definitions[statement.target.name][0] = found
                    settled = True
                if isinstance(statement.value, (ir.Global, ir.FreeVar)) and _is_verb(statement.value.value):
                    statement.value.value = _inlined(statement.value.value)
                uses.update((statement.target.name, *names_read(statement.value)))
            else:
                uses.update([variable.name for variable in statement.list_vars()])
    if settled:
        for block in function.blocks.values():
            block.body = [each for each in block.body if not _idle(each, uses)]


def _settled(value: Any, definitions: Any) -> Any:
    """The constant that an expression stands for, or None."""
    if value.op == "getattr":
        owner = _constant(value.value, definitions)
        if owner is None or not _has_members(owner.value):
            return None
        return ir.Global(f"{owner.name}.{value.attr}", getattr(owner.value, value.attr), value.loc)
    if value.op == "binop" and value.fn in FOLDED:
        both = [_constant(side, definitions) for side in (value.lhs, value.rhs)]
        if all(each is not None and type(each.value) is int for each in both):
            return ir.Const(value.fn(*(each.value for each in both)), value.loc)
    return None


def _is_verb(value: Any) -> bool:
    """Whether it is a Python function, but none of Numba's own, which stand for what it knows (libdevice)."""
    return isinstance(value, FunctionType) and not (value.__module__ or "").startswith("numba.")


def _inlined(function: Any) -> Any:
    """Numba's form of it, which lives as long as it does; a copy, with the attributes of another, has its own."""
    made = vars(function).get(INLINED)
    if made is None or made.py_func is not function:
        made = cuda.jit(device=True, inline="always")(function)  # pyright: ignore[reportArgumentType]
        setattr(function, INLINED, made)
    return made


def _constant(variable: Any, definitions: Any) -> Any:
    """What a variable is once and for all, or None."""
    found = definitions.get(variable.name, ())
    if len(found) == 1 and isinstance(found[0], (ir.Global, ir.FreeVar, ir.Const)):
        return found[0]
    return None


def _has_members(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return type(value) is not ModuleType  # a Namespace
    return is_record(value) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def is_record(value: Any) -> bool:
    """Return whether a value is an instance of a frozen dataclass."""
    return is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _idle(statement: Any, uses: Counter[str]) -> bool:
    """Whether it names a record or noun for nobody: Numba has no type for the first."""
    if type(statement) is not ir.Assign or uses[statement.target.name] > 1:
        return False
    return isinstance(statement.value, (ir.Global, ir.FreeVar)) and _has_members(statement.value.value)
