"""How parameters look to torch's dispatcher, whose schemas have types for numbers, booleans and strings alone.

A parameter of kind "text" may be anything else: it travels as the text of its normal form. A literal (None, True, a
word in quotes, a tuple of numbers) is read again from its text, in any process; what is no literal, as a user's
function, is remembered in this process under its repr, which must tell it from all others. A graph may have a number
behind that, where it must ask whether what the function reads is as it was when the graph was made (`compiled`).
"""

from __future__ import annotations

import ast
import operator
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from ..spec.attention import UserFunction
from ..spec.base import Param
from .compiled import Dependence, constant, depend_on, dependences
from .recomputed import note

KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "SymInt": (int, torch.SymInt),  # an integer that a compiled function may leave open, as it does sizes
    "float": (float, int),
    "str": (str,),
    "text": (object,),
}
MOST_RECENT = 256
MARK = "@"  # between a function's text and such a number
_KNOWN: dict[str, Any] = {}  # values by their texts, which are in graphs
_RECENT: OrderedDict[str, Any] = OrderedDict()  # those that no graph has, as far as is known
_DEPENDENCES: dict[str, list[Dependence]] = {}  # what must not change, by the texts that graphs have
_numbers = count()


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
    value = _constant(value)
    if not torch.compiler.is_dynamo_compiling():
        return _text_of(param.domain, value)
    functions = [part for part in (value if isinstance(value, tuple) else (value,)) if callable(part)]
    return _compiled_text(param.domain, value, tuple(depend_on(function) for function in functions))


def from_text(text: str) -> Any:
    """The value of such a text. What cannot be read stays as it is, and the parameter's domain refuses it.

    RuntimeError where a graph has the text of a function that reads other values now.
    """
    for dependence in _DEPENDENCES.get(text, ()):
        dependence.check()
    for name in (text, text.rpartition(MARK)[0]):
        for table in (_KNOWN, _RECENT):
            if name in table:
                if isinstance(known := table[name], UserFunction):
                    note(known)
                return known
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
    return value


def _text_of(domain: Callable[[Any], Any], value: Any, for_graph: bool = False) -> str:
    try:
        known = domain(value)
        text = repr(known)
    except (TypeError, ValueError):
        known, text = value, f"refused {id(value)}"  # where the call is bound, in the spec's words
    if for_graph or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        _KNOWN[text] = known
    else:
        remember(text, known)
    return text


def remember(text: str, value: Any) -> None:
    """Keep a value for a while, to be found by its text."""
    if text not in _RECENT and len(_RECENT) >= MOST_RECENT:
        _RECENT.popitem(last=False)
    _RECENT[text] = value


@constant
def _compiled_text(domain: Callable[[Any], Any], value: Any, from_outside: tuple[bool, ...]) -> str:
    """The text of a value, with a number where the graph must ask whether what a function reads has changed."""
    text = _text_of(domain, value, for_graph=True)
    functions = filter(callable, value if isinstance(value, tuple) else (value,))
    found = [one for function, outside in zip(functions, from_outside) for one in dependences(function, outside)]
    if found:
        text += f"{MARK}{next(_numbers)}"
        _DEPENDENCES[text] = found
    return text
