"""Problems as text: "flash_attention q=2x32x4096x128:bfloat16 k=2x8x4096x128 v=2x8x4096x128 causal=True".

    problem   = operator, then words separated by spaces
    word      = input=shape[@order][:dtype]  or  parameter=value
    shape     = sizes joined by x; () for an array without axes
    order     = numbers of the axes in memory, the slowest first: 0213 for [B, H, S, D] stored as [B, S, H, D]
    value     = a Python literal without spaces; anything else is a string

The first input's dtype is float32 by default. The other inputs follow it if they may; statistics and similar arrays
have their own. An input that may be a number on the host, as Lion's lr, may be left out, or be a number.
"""

from __future__ import annotations

import ast
from typing import Any

from .base import Case, Input, Role, Spec


def case_of(text: str, operators: dict[str, Spec]) -> tuple[Spec, Case]:
    """Parse the operator and the case of a text; the case is not yet validated.

    Raises ValueError, with the word, for an unreadable text.
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
        key, equals, value = word.partition("=")
        if not equals or key in seen or key not in {*inputs, *params}:
            raise ValueError(
                f"{name}: {word}, expected name=..., each once, of {', '.join([*inputs, *sorted(params)])}"
            )
        seen.add(key)
        if key in params:
            values[key] = value_of(value)
        else:
            shapes[key], order, dtype = _array(name, inputs[key], value)
            orders |= {key: order} if order else {}
            dtypes |= {key: dtype} if dtype else {}
    first = dtypes.get(spec.inputs[0].name, "float32")
    for given in spec.inputs:
        if given.role is Role.WEIGHT and given.name in shapes:
            dtypes.setdefault(given.name, first)
    return spec, Case(text, first, shapes, values, frozenset(), orders=orders, dtypes=dtypes)


def value_of(text: str) -> Any:
    """Parse a Python literal, or else return the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _array(op: str, given: Input, value: str) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Parse shape, order of axes and dtype; the latter two may be missing."""
    place, _, dtype = value.partition(":")
    sizes, at, order = place.partition("@")
    if given.host and isinstance(value_of(value), (int, float)):
        return (), (), ""
    parts = [] if sizes == "()" else sizes.split("x")
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{op}: {given.name}={value}, expected a shape such as 2x32x4096x128, and :dtype")
    if at and sorted(order) != [str(axis) for axis in range(len(parts))]:
        raise ValueError(f"{op}: {given.name}={value}, expected each of its {len(parts)} axes once after the @")
    return tuple(map(int, parts)), tuple(map(int, order)), dtype
