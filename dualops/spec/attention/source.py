"""Parse a Python function to a syntax tree, and build a Python function from a tree.

A tree comes from the file that the function was compiled from. Its bytecode must match the function's.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dis
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_VARARGS, CO_VARKEYWORDS
from itertools import count
from types import CodeType, FunctionType, MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

OF_CLIP = {"a": 0, "a_min": 1, "min": 1, "a_max": 2, "max": 2}  # np.clip's parameters and their places


@dataclass(frozen=True, eq=False)
class Source:
    """A function's tree, with only positional parameters and a body, and the values of its other names."""

    tree: ast.FunctionDef
    values: Mapping[str, Any]  # what it closes over
    globals: dict[str, Any]
    file: str

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(argument.arg for argument in self.tree.args.args)

    @cached_property
    def locals(self) -> frozenset[str]:
        """Return parameters and assigned names."""
        return frozenset({*self.parameters, *_stored(self.tree.body)})

    def value(self, node: ast.AST) -> Any:
        """Return the value of a name, or of a name with attributes. Raises LookupError if it depends on the call."""
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if not hasattr(owner, node.attr):
                raise LookupError(node.attr)
            return getattr(owner, node.attr)
        if not isinstance(node, ast.Name) or node.id in self.locals:
            raise LookupError(ast.unparse(node))
        for scope in (self.values, self.globals, vars(builtins)):
            if node.id in scope:
                return scope[node.id]
        raise LookupError(node.id)

    def clipped(self, call: ast.Call) -> tuple[ast.expr, ast.expr | None, ast.expr | None] | None:
        """Return what a call of np.clip clips, and its lower and upper bound if given. None for other calls."""
        found: list[ast.expr | None] = [None, None, None]
        places = [*range(len(call.args)), *(OF_CLIP.get(keyword.arg or "") for keyword in call.keywords)]
        for place, value in zip(places, [*call.args, *(keyword.value for keyword in call.keywords)]):
            if place is None or place > 2 or isinstance(value, ast.Starred):
                return None
            found[place] = value
        x, low, high = found
        if x is None or not self._stands_for(call.func, np.clip):
            return None
        return x, None if self._stands_for(low, None) else low, None if self._stands_for(high, None) else high

    def _stands_for(self, node: ast.expr | None, value: Any) -> bool:
        if node is None or isinstance(node, ast.Constant):
            return (node.value if node else None) is value
        try:
            return self.value(node) is value
        except LookupError:
            return False

    def fresh_names(self) -> Callable[[str], str]:
        """Return a function from a stem to an unused name, a new one at each call."""
        taken = {*self.values, *self.parameters}
        taken.update(node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name))

        def fresh(stem: str) -> str:
            name = next(name for name in _numbered(stem) if name not in taken)
            taken.add(name)
            return name

        return fresh


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    yield from (f"{stem}_{number}" for number in count(2))


_made: WeakKeyDictionary[FunctionType, Source] = WeakKeyDictionary()


def build(source: Source) -> FunctionType:
    """Build the function of a tree. Its lines are those of `source.file`, for tracebacks and for Numba's errors."""
    inner = copy.copy(source.tree)
    while inner.name in source.values:  # one lambda may call another, which its own name would hide
        inner.name += "_"
    tree = ast.fix_missing_locations(_factory(inner, tuple(source.values)))
    scope: dict[str, Any] = {}
    exec(compile(tree, source.file, "exec", dont_inherit=True), source.globals, scope)
    function = scope["factory"](*source.values.values())
    function.__name__ = source.tree.name
    _made[function] = source
    return function


def source_of(function: FunctionType, count: int) -> Source:
    """Return the tree of a function, as one of `count` parameters; further parameters keep their defaults.

    Raises TypeError, in a message that continues after the function's name, if there is no source or it has changed.
    """
    if function in _made:
        return _made[function]
    node = _node(function.__code__)
    body = node.body
    if isinstance(body, ast.expr):
        body = [ast.copy_location(ast.Return(body), body)]
    tree = ast.copy_location(definition(function.__code__.co_name, node.args, body), node)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {name: cell.cell_contents for name, cell in cells}
    source = Source(tree, MappingProxyType(values), function.__globals__, function.__code__.co_filename)
    return _with_parameters(source, function, count)


def _with_parameters(source: Source, function: FunctionType, count: int) -> Source:
    """Return the function with `count` parameters; the others have defaults and become names that it closes over."""
    arguments, fresh = source.tree.args, source.fresh_names()
    own = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    values = {**source.values, **(function.__kwdefaults__ or {})}
    defaults = function.__defaults__ or ()
    values |= dict(zip(own[len(own) - len(defaults) :], defaults, strict=True))
    for name in own[:count]:
        values.pop(name, None)
    loaded = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    rest = [fresh("_") for _ in range(count - len(own))]
    if rest and (arguments.vararg is None or arguments.vararg.arg in loaded):
        raise TypeError(f"takes {len(own)} named arguments, expected {count}")
    if reassigned := values.keys() & _stored(source.tree.body):
        raise TypeError(f"assigns to {', '.join(sorted(reassigned))}, which is not its own or has a default value")
    tree = definition(source.tree.name, positional([*own[:count], *rest]), source.tree.body)
    return Source(ast.copy_location(tree, source.tree), MappingProxyType(values), source.globals, source.file)


def _stored(body: list[ast.stmt]) -> set[str]:
    nodes = [node for statement in body for node in ast.walk(statement)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}


def definition(name: str, arguments: ast.arguments, body: Sequence[ast.stmt]) -> ast.FunctionDef:
    """def name(arguments): body."""
    made = ast.FunctionDef(name, arguments, list(body), [])
    if "type_params" in made._fields:  # Python 3.12
        made.type_params = []  # type: ignore[attr-defined]
    return made


def positional(names: Iterable[str]) -> ast.arguments:
    return ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])


def _factory(inner: ast.stmt | ast.expr, free: tuple[str, ...]) -> ast.Module:
    """def factory(free, ...): return inner."""
    result = inner if isinstance(inner, ast.expr) else ast.Name(inner.name, ast.Load())  # type: ignore[attr-defined]
    body = [*([inner] if isinstance(inner, ast.stmt) else []), ast.Return(result)]
    return ast.Module([definition("factory", positional(free), body)], [])


# --- find the function's tree --------------------------------------------------------------------------


def _node(code: CodeType) -> ast.FunctionDef | ast.Lambda:
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename))
    if not text:
        raise TypeError(f"has no source: {code.co_filename} can't be read")
    try:
        nodes = _functions(text)
    except SyntaxError:
        nodes = ()
    for node in nodes:
        if _first_line(node) == code.co_firstlineno and _steps(_compiled(node, code)) == _steps(code):
            return node
    raise TypeError(f"has no source: line {code.co_firstlineno} of {code.co_filename} is not what was compiled")


@lru_cache(maxsize=16)
def _functions(text: str) -> tuple[ast.FunctionDef | ast.Lambda, ...]:
    return tuple(node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.Lambda)))


def _first_line(node: ast.FunctionDef | ast.Lambda) -> int:
    return min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))


def _compiled(node: ast.FunctionDef | ast.Lambda, code: CodeType) -> CodeType:
    """Return the code of a function alone: decorators, defaults and annotations belong to the enclosing code."""
    arguments = copy.deepcopy(node.args)
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    if isinstance(node, ast.Lambda):
        bare: ast.stmt | ast.expr = ast.copy_location(ast.Lambda(arguments, node.body), node)
    else:  # by a name that its body can't use
        bare = ast.copy_location(definition("<function>", arguments, node.body), node)
    module = compile(ast.fix_missing_locations(_factory(bare, code.co_freevars)), "", "exec", dont_inherit=True)
    return _inner(_inner(module))


def _inner(code: CodeType) -> CodeType:
    return next(constant for constant in code.co_consts if isinstance(constant, CodeType))


def _steps(code: CodeType) -> list[Any]:
    """Return the steps of a code object. How a method is called depends on what else its module imports."""
    steps: list[Any] = [code.co_varnames, code.co_freevars, code.co_cellvars]
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname.replace("METHOD", "ATTR"), instruction.argval
        if isinstance(value, CodeType):
            steps.append(_steps(value))
        elif name not in ("PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP"):
            jumps = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
            steps.append((name, None if jumps else constant_facts(value)))
    return steps


def code_facts(code: CodeType) -> str:
    """Describe all that matters of a code object, the same in every process."""
    constants = [code_facts(c) if isinstance(c, CodeType) else constant_facts(c) for c in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    flags = code.co_flags & (CO_VARARGS | CO_VARKEYWORDS | CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, flags)
    return repr((code.co_code, code.co_exceptiontable, names, counts, constants))


def constant_facts(constant: Any) -> str:
    """Describe a constant, its type and its sign; the members of a set in order."""
    if isinstance(constant, frozenset):
        return repr(sorted(map(constant_facts, constant)))
    if isinstance(constant, tuple):
        return repr([constant_facts(part) for part in constant])
    return f"{type(constant).__name__}:{constant!r}"
