"""How parameters look to torch's dispatcher, whose schemas have types for numbers, booleans and strings alone.

A parameter of kind "text" may be anything else: it travels as the text of its normal form. A literal (None, True, a
word in quotes, a tuple of numbers) is read again from its text, in any process; what is no literal, as a user's
function, is remembered in this process under its repr, which must tell it from all others.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..spec.base import Param

KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "SymInt": (int, torch.SymInt),  # an integer that a compiled function may leave open, as it does sizes
    "float": (float, int),
    "str": (str,),
    "text": (object,),
}
_KNOWN: dict[str, Any] = {}  # values by their texts
Made = TypeVar("Made", bound=Callable[..., Any])


def constant(function: Made) -> Made:
    """Let torch.compile call a function when it compiles, and keep what it gives, in place of reading along.

    This is torch.compiler.assume_constant_result without its import of torch._dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def fits(kind: str, value: Any) -> bool:
    """Whether torch takes `value` for what it is where the schema says `kind`. It would take True for 1."""
    if kind == "text" or (value is None and kind.endswith("?")):
        return True
    return type(value) in KINDS[kind.removesuffix("?")]


def declaration(param: Param, kind: str) -> str:
    """A parameter in a schema; without a default if that is None where None is not allowed."""
    if kind == "text":
        return f'str {param.name}="{as_text(param, param.default)}"'
    if param.default is None and not kind.endswith("?"):
        return f"{kind} {param.name}"
    default = f'"{param.default}"' if isinstance(param.default, str) else repr(param.default)
    return f"{kind} {param.name}={default}"


def as_text(param: Param, value: Any) -> str:
    """The text of a value, for the schema. torch.compile reads along, and compiles again for another value."""
    return _remembered(param.domain, _constant(value))


def from_text(text: str) -> Any:
    """The value of such a text. What cannot be read stays as it is, and the parameter's domain refuses it."""
    if text in _KNOWN:
        return _KNOWN[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError):
        return text


def _constant(value: Any) -> Any:
    """The same, and a constant of what torch.compile makes of the caller."""
    if isinstance(value, (tuple, list)):
        return tuple(_constant(part) for part in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return operator.index(value)  # a compiled function may have left it open
    if callable(value):
        id(value)  # torch.compile tells functions by their code, unless it is asked: closures of one code may differ
    return value


@constant
def _remembered(domain: Callable[[Any], Any], value: Any) -> str:
    try:
        known = domain(value)
        text = repr(known)
    except (TypeError, ValueError):
        known, text = value, f"refused {id(value)}"  # where the call is bound, in the spec's words
    _KNOWN[text] = known
    return text
