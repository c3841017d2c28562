"""Variables in Numba's IR: which a right side reads, and a copy with others in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numba.cuda.core import ir


def names_read(value: Any) -> list[str]:
    """Names of the variables that the right side of an assignment reads. As `list_vars`, which takes long."""
    kind = type(value)
    if kind is ir.Var:
        return [value.name]
    if kind is not ir.Expr:
        return [each.name for each in value.list_vars()] if isinstance(value, ir.Inst) else []
    found: list[str] = []
    for each in value._kws.values():
        what = type(each)
        if what is ir.Var:
            found.append(each.name)
        elif what is tuple or what is list:
            for part in each:
                if type(part) is ir.Var:
                    found.append(part.name)
                elif type(part) is tuple or type(part) is list:
                    found.extend(inner.name for inner in part if type(inner) is ir.Var)
        elif what is dict:
            return [each.name for each in value.list_vars()]
    return found


def renamed_expression(value: Any, names: Mapping[str, Any]) -> Any:
    """Return a copy of an ir.Expr with its variables renamed."""
    made = object.__new__(ir.Expr)
    kws = {}
    for key, each in value._kws.items():
        kind = type(each)
        if kind is ir.Var:
            each = names[each.name]
        elif kind is tuple or kind is list or kind is dict:
            each = renamed(each, names)
        kws[key] = each
    made.__dict__.update(op=value.op, loc=value.loc, _kws=kws)
    return made


def renamed(value: Any, names: Mapping[str, Any]) -> Any:
    """A copy of a statement, or of what lies in one."""
    kind = type(value)
    if kind is ir.Var:
        return names[value.name]
    if kind is tuple or kind is list:
        return kind([renamed(each, names) for each in value])
    if kind is dict:
        return {key: renamed(each, names) for key, each in value.items()}
    if kind is ir.Expr:
        return renamed_expression(value, names)
    if isinstance(value, ir.Stmt):
        made = object.__new__(kind)
        made.__dict__.update((name, renamed(each, names)) for name, each in value.__dict__.items())
        return made
    return value
