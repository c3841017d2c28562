"""Problems as text: "flash_attention q=2x32x4096x128:bfloat16 k=2x8x4096x128 v=2x8x4096x128 causal=True".

    problem   = operator, then words apart from one another
    word      = input=shape[@order][:dtype]  or  parameter=value
    shape     = sizes joined by x; () of an array without axes
    order     = numbers of the axes as they lie in memory, the slowest first: 0213 of [B, H, S, D] kept as [B, S, H, D]
    value     = as Python writes it, without spaces; what is not Python is a string

The first input's dtype, float32 unless it is said, is that of the others too where they may have it; statistics and the
like have their own. What may be a number on the host, as Lion's lr is, may be left out, or be any number.
"""

from __future__ import annotations

import ast
from typing import Any

from .base import Case, Input, Role, Spec


def case_of(text: str, operators: dict[str, Spec]) -> tuple[Spec, Case]:
    """The operator that a text names, and the case that it states, which is yet to be bound.

    Raises ValueError for what can't be read, with the word.
    """
    name, *words = text.split() or [""]
    if name not in operators:
        raise ValueError(f"{name or 'an empty problem'} is no operator, expected one of {', '.join(operators)}")
    spec = operators[name]
    inputs = {given.name: given for given in spec.inputs}
    params = [param.name for param in spec.params]
    shapes: dict[str, tuple[int, ...]] = {given.name: () for given in spec.inputs if given.host and not given.optional}
    dtypes, orders, values = dict[str, str](), dict[str, tuple[int, ...]](), dict[str, Any]()
    seen = set[str]()
    for word in words:
        key, equals, told = word.partition("=")
        if not equals or key in seen or key not in {*inputs, *params}:
            raise ValueError(
                f"{name}: {word}, expected name=..., each once, of {', '.join([*inputs, *sorted(params)])}"
            )
        seen.add(key)
        if key in params:
            values[key] = value_of(told)
        else:
            shapes[key], order, dtype = _array(name, inputs[key], told)
            orders |= {key: order} if order else {}
            dtypes |= {key: dtype} if dtype else {}
    first = dtypes.get(spec.inputs[0].name, "float32")
    for given in spec.inputs:
        if given.role is Role.WEIGHT and given.name in shapes:
            dtypes.setdefault(given.name, first)
    return spec, Case(text, first, shapes, values, frozenset(), orders=orders, dtypes=dtypes)


def value_of(text: str) -> Any:
    """A Python literal, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _array(op: str, given: Input, told: str) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Shape, order of axes and dtype; the latter two may be missing."""
    place, _, dtype = told.partition(":")
    sizes, at, order = place.partition("@")
    if given.host and isinstance(value_of(told), (int, float)):
        return (), (), ""
    parts = [] if sizes == "()" else sizes.split("x")
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{op}: {given.name}={told}, expected a shape such as 2x32x4096x128, and :dtype")
    if at and sorted(order) != [str(axis) for axis in range(len(parts))]:
        raise ValueError(f"{op}: {given.name}={told}, expected each of its {len(parts)} axes once behind the @")
    return tuple(map(int, parts)), tuple(map(int, order)), dtype
