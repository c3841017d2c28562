"""Parameters in torch's dispatcher, whose schemas have types only for numbers, booleans and strings.

A parameter of kind "text" may be anything else: it is passed as the text of its normal form. A literal (None, True, a
quoted string, a tuple of numbers) is parsed from its text, in any process. Other values, such as a user's function, are
remembered in this process under their repr, which must be unique. In a graph a number may follow the repr. The graph
then checks at run time whether the values that the function reads are those of the compilation (`compiled`).
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
    "SymInt": (int, torch.SymInt),  # an integer that a compiled function may leave open, as sizes
    "float": (float, int),
    "str": (str,),
    "text": (object,),
}
MOST_RECENT = 256
MARK = "@"  # between a function's text and such a number
_KNOWN: dict[str, Any] = {}  # values of texts in graphs
_RECENT: OrderedDict[str, Any] = OrderedDict()  # values of texts that no known graph has
_DEPENDENCES: dict[str, list[Dependence]] = {}  # values that must not change, by the texts in graphs
_numbers = count()


def fits(kind: str, value: Any) -> bool:
    """Whether torch accepts `value` unchanged for the schema's `kind`. It would take True for 1."""
    if kind == "text" or (value is None and kind.endswith("?")):
        return True
    return type(value) in KINDS[kind.removesuffix("?")]


def declaration(param: Param, kind: str) -> str:
    """Return a parameter's declaration in a schema; without a default if that is None and None is not allowed."""
    if kind == "text":
        return f'str {param.name}="{as_text(param, param.default)}"'
    if param.default is None and not kind.endswith("?"):
        return f"{kind} {param.name}"
    default = f'"{param.default}"' if isinstance(param.default, str) else repr(param.default)
    return f"{kind} {param.name}={default}"


def as_text(param: Param, value: Any) -> str:
    """Return the text of a value, for the schema. torch.compile traces this, and compiles again for another value."""
    value = _constant(value)
    if not torch.compiler.is_dynamo_compiling():
        return _text_of(param.domain, value)
    functions = [part for part in (value if isinstance(value, tuple) else (value,)) if callable(part)]
    return _compiled_text(param.domain, value, tuple(depend_on(function) for function in functions))


def from_text(text: str) -> Any:
    """Return the value of such a text. An unreadable text is returned unchanged, and the parameter's domain refuses it.

    Raises RuntimeError if a graph has the text of a function that reads other values now.
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
    """`as_text` as a constant that torch.compile makes from the caller's value."""
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
        known, text = value, f"refused {id(value)}"  # bound later, which raises the spec's error
    if for_graph or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        _KNOWN[text] = known
    else:
        remember(text, known)
    return text


def remember(text: str, value: Any) -> None:
    """Keep a value for a while, under its text."""
    if text not in _RECENT and len(_RECENT) >= MOST_RECENT:
        _RECENT.popitem(last=False)
    _RECENT[text] = value


@constant
def _compiled_text(domain: Callable[[Any], Any], value: Any, from_outside: tuple[bool, ...]) -> str:
    """Return the text of a value, with a number if the graph must check what a function reads."""
    text = _text_of(domain, value, for_graph=True)
    functions = filter(callable, value if isinstance(value, tuple) else (value,))
    found = [one for function, outside in zip(functions, from_outside) for one in dependences(function, outside)]
    if found:
        text += f"{MARK}{next(_numbers)}"
        _DEPENDENCES[text] = found
    return text
