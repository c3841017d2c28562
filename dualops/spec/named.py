"""Options by name: `**options` of a function, derived from the spec.

    @names_options(SPEC, backward=True)
    def flash_attention_backward(q, k, v, o, lse, do, dlse=None, **options: Unpack[Options[np.ndarray]]): ...

A package writes an operator's options once, in the operator's own function. Its gradient and its variants take them by
name, so a new option does not change them. `help` and `inspect.signature` show all options, type checkers read them
from a TypedDict, and an unknown name raises an error that lists the known ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, Signature, getdoc, signature
from typing import Any, TypeVar

from .base import Input, Param, Spec

Function = TypeVar("Function", bound=Callable[..., Any])


def arguments_of(spec: Spec, *, backward: bool = False) -> tuple[tuple[Input, ...], tuple[Param, ...]]:
    """Return the arrays and the parameters of a direction."""
    return (spec.gradient_inputs, spec.params + spec.gradient_params) if backward else (spec.inputs, spec.params)


def defaults_of(spec: Spec, *, backward: bool = False) -> dict[str, Any]:
    """Return the optional arrays and parameters of a call, and their defaults."""
    inputs, params = arguments_of(spec, backward=backward)
    return {entry.name: None for entry in inputs if entry.optional} | {param.name: param.default for param in params}


def with_options(
    spec: Spec, given: Mapping[str, Any], options: Mapping[str, Any], *, backward: bool = False
) -> dict[str, Any]:
    """Add defaults for the options that a call leaves out. Raises TypeError for an unknown one."""
    known = defaults_of(spec, backward=backward)
    if not options.keys() <= known.keys():
        raise refusal(f"{spec.name}_backward" if backward else spec.name, options, known)
    return {**known, **given, **options}


def refusal(op: str, names: Iterable[str], known: Iterable[str]) -> TypeError:
    """Return the error of a call with unknown names."""
    known = list(known)
    unknown = ", ".join(name for name in names if name not in known)
    return TypeError(f"{op}: unknown argument {unknown}, expected one of {', '.join(known)}")


def names_options(spec: Spec, *, backward: bool = False) -> Callable[[Function], Function]:
    """Decorate a function with `**options`: its signature and its docstring list the options."""

    def decorated(function: Any) -> Any:
        text, full = (of(function, spec, backward=backward) for of in (described, written_out))
        function.__doc__, function.__signature__ = text, full
        return function

    return decorated


def written_out(function: Callable[..., Any], spec: Spec, *, backward: bool = False) -> Signature:
    """Return the function's signature with the options in place of `**options`, before its own keyword arguments."""
    declared = signature(function)
    own = [each for each in declared.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default)
        for name, default in defaults_of(spec, backward=backward).items()
        if name not in declared.parameters
    ]
    by_keyword = [each for each in own if each.kind is Parameter.KEYWORD_ONLY]
    return declared.replace(parameters=[*own[: len(own) - len(by_keyword)], *options, *by_keyword])


def described(function: Callable[..., Any], spec: Spec, *, backward: bool = False) -> str:
    """Return the function's docstring with a line for each of the options."""
    own = signature(function).parameters
    inputs, params = arguments_of(spec, backward=backward)
    found = [entry for entry in (*inputs, *params) if entry.doc and entry.name not in own]
    return "\n".join([getdoc(function) or "", "", "options:", *map(_line, found)])


def _line(entry: Input | Param) -> str:
    axes = f" [{', '.join(entry.axes)}]" if isinstance(entry, Input) and entry.axes else ""
    return f"{entry.name}{axes}: {entry.doc}"
