"""Declare public functions: a person writes signature and docstring, and the call is derived from the spec.

    @calls("backward", SPEC, backward=True)
    def flash_attention_backward(q, k, v, o, lse, do, dlse=None, *, out=None, kernel=None, stream=None, **options): ...

becomes, with every option by its name,

    def flash_attention_backward(q, k, v, o, lse, do, dlse=None, *, bias=None, ..., out=None, kernel=None, stream=None):
        return backward((q, k, v, o, lse, do, dlse, bias, ...), (scale, ...), out, kernel, stream)

Python binds an argument to the name of a parameter in nanoseconds. Collecting `**options` and sorting them into the
spec's order takes 0.4 to 1 microsecond, while a whole call takes the host 10 to 20. So the source of the function is
generated once, as dataclasses do.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, signature
from typing import Any, TypedDict, TypeVar

from ..spec import Spec
from ..spec.named import arguments_of, defaults_of, described, refusal, written_out

Function = TypeVar("Function", bound=Callable[..., Any])
Array = TypeVar("Array")  # of any library: results are of the inputs' library


class Launch(TypedDict, total=False):
    """The keyword arguments of every public function in addition to its operator's own, for type checkers."""

    out: Any
    kernel: str | None
    stream: Any


def calls(
    operation: str, spec: Spec, *, backward: bool = False, settled: Callable[..., Any] | None = None
) -> Callable[[Function], Function]:
    """Decorate a function with `**options` so that it calls an `Operation`. The function's own body never runs.

    operation: its name in the function's module. settled: a function whose parameters are some of the operator's. If
    one of these is not None, the call replaces them by the results of `settled`.
    """

    def made(declared: Any) -> Any:
        written = written_out(declared, spec, backward=backward)
        known = [*defaults_of(spec, backward=backward), "out", "kernel", "stream"]
        text = _text(declared.__name__, written, operation, spec, backward, settled)
        file = f"<{declared.__module__}.{declared.__name__}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
        scope: dict[str, Any] = {}
        exec(compile(text, file, "exec"), declared.__globals__, scope)
        function = scope["function_of"](settled, lambda names: refusal(declared.__name__, names, known))
        function.__defaults__ = declared.__defaults__
        function.__kwdefaults__ = {each.name: each.default for each in _by_keyword(written)}
        function.__module__, function.__qualname__ = declared.__module__, declared.__qualname__
        function.__signature__ = written
        function.__doc__ = described(declared, spec, backward=backward)
        return function

    return made


def _text(
    name: str, written: Signature, operation: str, spec: Spec, backward: bool, settled: Callable[..., Any] | None
) -> str:
    """Return the source of a function that creates the public function from the operation and what else it calls."""
    keyword = [each.name for each in _by_keyword(written)]
    first = [each for each in written.parameters if each not in keyword]
    arrays, params = (_tuple(entry.name for entry in entries) for entries in arguments_of(spec, backward=backward))
    body = ["if unknown:", "    raise refusal(unknown)"]
    if settled is not None:
        names = list(signature(settled).parameters)
        body += [f"if {' or '.join(f'{each} is not None' for each in names)}:"]
        body += [f"    {', '.join(names)} = settled({', '.join(names)})"]
    body += [f"return {operation}({arrays}, {params}, out, kernel, stream)"]
    head = ["def function_of(settled, refusal):", f"    def {name}({', '.join([*first, '*', *keyword, '**unknown'])}):"]
    return "\n".join([*head, *(f"        {line}" for line in body), f"    return {name}", ""])


def _by_keyword(written: Signature) -> list[Parameter]:
    return [each for each in written.parameters.values() if each.kind is Parameter.KEYWORD_ONLY]


def _tuple(names: Iterable[str]) -> str:
    return f"({', '.join(names)},)"
