"""Turn a user's function into a verb whose arithmetic stays in the kernel's number type.

To Numba a Python float is a float64, and so is the product of a float32 and an int32. So `score + 0.1 * (i - j)` would
be slow, and would have another result. So the function's syntax tree is rewritten. The kind of every value is inferred
from the parameters. Python numbers become constants of the kernel's type. An integer is converted before an operation
with a float. A variable that is a float in one place is a float everywhere.

    score + 0.1 * (i - j)        becomes        score + c * number(i - j)        with c = number(0.1)
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np

from ...spec.attention.function import UserFunction
from ...spec.attention.source import Source, build, definition, positional, source_of
from ..compiler.backend import verb
from ..tile.fast_math import fast_tanh
from .calls import BOOL, CONVERSIONS, EXTREMES, FLOAT, FUNCTIONS, INT, LOGICAL, ROUNDINGS, Kind, nearest, power, sign

Typed = tuple[ast.expr, Kind]
Helpers = dict[Any, tuple[Any, Kind] | None]  # function and its arguments' kinds -> rewritten, and its result's kind

QUICK = {FUNCTIONS[math.tanh].implementation: fast_tanh}  # function -> its faster replacement


class Unknown(Exception):
    """A part of the function has none of these kinds."""


def typed(user: UserFunction, number: Any, approximate: bool = False) -> Callable[..., Any]:
    """Return the user's function as a verb on numbers of the type `number` (f32 or f64) and integers of any width.

    approximate: functions may have a relative error of 3e-6, and a quotient by a constant becomes a product.
    If a function has no source, or calls and statements of unknown kinds, it is compiled unchanged. Its result is
    converted, but the arithmetic inside may be float64. In libdevice's sin, cos and tan, a few instructions for large
    arguments may be float64, too.
    """
    scores = user.parameters[0] == "score"
    kinds = tuple(FLOAT if name == "score" else INT for name in user.parameters)
    try:
        return verb(_Typing(user.function, kinds, number, approximate, {}).made(FLOAT if scores else BOOL))
    except Unknown:
        own = verb(user.function)

    @verb
    def score(score, b, h, i, j):
        return number(own(score, b, h, i, j))

    @verb
    def visible(b, h, i, j):
        return bool(own(b, h, i, j))

    return score if scores else visible


class _Typing:
    """Rewrite one function for parameters of these kinds. `helpers`: the rewritten functions that it calls."""

    def __init__(self, function: FunctionType, kinds: Sequence[Kind], number: Any, approximate: bool, helpers: Helpers):
        self.number, self.approximate, self.helpers = number, approximate, helpers
        try:
            self.source = source_of(function, len(kinds))
        except TypeError:
            raise Unknown from None
        self.given = dict(zip(self.source.parameters, kinds, strict=True))
        self.kinds = dict.fromkeys(self.source.locals, Kind.NOTHING) | self.given
        self.result = self.wanted = Kind.NOTHING
        self.fresh = self.source.fresh_names()
        self.names: dict[Any, str] = {}  # what a generated name is for -> the name
        self.values: dict[str, Any] = {}
        self.floats: dict[str, float] = {}  # generated names of floats -> their values

    def made(self, wanted: Kind = Kind.NOTHING) -> FunctionType:
        """Return the rewritten function. Its result has the kind `wanted` if given, else the kind `self.result`."""
        self.wanted = wanted
        body, known = self._block(self.source.tree.body), None
        while known != (self.kinds, self.result):  # a variable's kind may change earlier statements
            known = (dict(self.kinds), self.result)
            body = self._block(self.source.tree.body)
        changed = [name for name, kind in self.given.items() if kind is not self.kinds[name]]
        head = [self._set(name, (_load(name), self.given[name])) for name in changed]
        tree = definition(self.source.tree.name, positional(self.given), [*head, *body])
        values = MappingProxyType({**self.source.values, **self.values})
        return build(Source(ast.copy_location(tree, self.source.tree), values, self.source.globals, self.source.file))

    # --- statements ------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        made = [ast.copy_location(new, old) for old in body for new in self._statement(old)]
        return made or [ast.Pass()]

    def _statement(self, node: ast.stmt) -> Iterator[ast.stmt]:
        match node:
            case ast.Return(value=ast.expr() as value):
                result = self.expression(value)
                self.result = self.wanted or max(self.result, result[1])
                yield ast.Return(self._cast(result, self.result))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield self._set(name, self.expression(value))
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                yield from self._set_together(targets, values)
            case ast.Assign(targets=targets, value=value):
                yield from self._set_together(targets, [value] * len(targets))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield self._set(name, self.expression(value))
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                yield self._set(name, self._binary(op, self.expression(_load(name)), self.expression(value)))
            case ast.If(test=test, body=body, orelse=orelse):
                yield ast.If(self.expression(test)[0], self._block(body), self._block(orelse) if orelse else [])
            case ast.While(test=test, body=body, orelse=[]):
                yield ast.While(self.expression(test)[0], self._block(body), [])
            case ast.For(target=ast.Name(id=name), iter=iterated, body=body, orelse=[]):
                yield self._loop(name, iterated, body)
            case ast.Pass() | ast.Break() | ast.Continue():
                yield node
            case ast.Expr(value=ast.Constant()):  # a docstring
                return
            case _:
                raise Unknown

    def _set(self, name: str, value: Typed) -> ast.stmt:
        self.kinds[name] = max(self.kinds[name], value[1])
        return ast.Assign([ast.Name(name, ast.Store())], self._cast(value, self.kinds[name]))

    def _set_together(self, targets: list[ast.expr], values: list[ast.expr]) -> Iterator[ast.stmt]:
        """Rewrite a, b = b, a; or a = b = value."""
        made = [self.expression(value) for value in values]
        stand_ins = [self._name(("stand-in", id(target)), "value") for target in targets]
        if len(made) != len(targets):
            raise Unknown
        for stand_in, (value, _) in zip(stand_ins, made, strict=True):
            yield ast.Assign([ast.Name(stand_in, ast.Store())], value)
        for target, stand_in, (_, kind) in zip(targets, stand_ins, made, strict=True):
            if not isinstance(target, ast.Name):
                raise Unknown
            yield self._set(target.id, (_load(stand_in), kind))

    def _loop(self, name: str, iterated: ast.expr, body: list[ast.stmt]) -> ast.stmt:
        """Rewrite a loop over a range or over a table."""
        if isinstance(iterated, ast.Call) and self._value(iterated.func) is range and not iterated.keywords:
            bounds = [self.expression(arg) for arg in iterated.args]
            if any(kind is FLOAT for _, kind in bounds):
                raise Unknown
            values: Typed = (ast.Call(iterated.func, [bound for bound, _ in bounds], []), INT)
        else:
            values = self._table(iterated)
        counter = self._name(("counter", name), name)
        inner = [self._set(name, (_load(counter), values[1])), *self._block(body)]
        return ast.For(ast.Name(counter, ast.Store()), values[0], inner, [])

    # --- expressions -----------------------------------------------------------------------------

    def expression(self, node: ast.expr) -> Typed:
        """Return the rewritten expression and the kind of its value."""
        match node:
            case ast.Constant() | ast.Attribute():
                return self._number(self._value(node))
            case ast.Name(id=name):
                return (node, self.kinds[name]) if name in self.kinds else self._number(self._value(node))
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(op, self.expression(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, self.expression(left), self.expression(right))
            case ast.BoolOp(op=op, values=values):
                parts, kind = self._to_one_kind([self.expression(value) for value in values])
                return ast.BoolOp(op, parts), kind
            case ast.Compare(left=left, ops=ops, comparators=others):
                if any(isinstance(op, (ast.In, ast.NotIn, ast.Is, ast.IsNot)) for op in ops):
                    raise Unknown
                (first, *rest), _ = self._to_one_kind([self.expression(part) for part in (left, *others)])
                return ast.Compare(first, ops, rest), BOOL
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._choice(self.expression(test), self.expression(body), self.expression(orelse))
            case ast.Subscript():
                return self._element(node)
            case ast.Call(func=function, args=[ast.Constant(value=str() as text)]) if self._value(function) is float:
                return self._number(float(text))  # "-inf"
            case ast.Call() if clipped := self.source.clipped(node):
                return self._clip(*clipped)
            case ast.Call(func=function, args=args, keywords=[]):
                return self._call(self._value(function), [self.expression(arg) for arg in args])
        raise Unknown

    def _unary(self, op: ast.unaryop, operand: Typed) -> Typed:
        value, kind = operand
        if isinstance(op, ast.USub) and isinstance(value, ast.Constant):
            return self._number(-int(value.value))  # type: ignore[arg-type]
        if isinstance(op, ast.Not) or (isinstance(op, ast.Invert) and kind is BOOL):
            return ast.UnaryOp(ast.Not(), value), BOOL
        if isinstance(op, ast.Invert) and kind is FLOAT:
            raise Unknown
        if kind is BOOL:
            return ast.UnaryOp(op, self._cast(operand, INT)), INT
        return ast.UnaryOp(op, value), kind

    def _binary(self, op: ast.operator, a: Typed, b: Typed) -> Typed:
        kind = max(a[1], b[1])
        if kind is BOOL and isinstance(op, (ast.Add, ast.Mult)):  # as in NumPy
            op = ast.BitOr() if isinstance(op, ast.Add) else ast.BitAnd()
        match op:
            case ast.Pow():
                return self._to_power(a, b)
            case ast.Div():
                kind = FLOAT
                if self.approximate and (divisor := self._constant(b)):
                    return ast.BinOp(self._cast(a, FLOAT), ast.Mult(), self._number(1.0 / divisor)[0]), FLOAT
            case ast.BitAnd() | ast.BitOr() | ast.BitXor() if kind is not FLOAT:
                pass
            case ast.LShift() | ast.RShift() if kind is not FLOAT:
                kind = INT
            case ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod():
                kind = max(kind, INT)
            case _:
                raise Unknown
        return ast.BinOp(self._cast(a, kind), op, self._cast(b, kind)), kind

    def _to_power(self, base: Typed, exponent: Typed) -> Typed:
        """Keep integers only if the exponent is known not to be negative."""
        known = exponent[0].value if isinstance(exponent[0], ast.Constant) else None
        if not isinstance(known, int):
            return ast.BinOp(self._cast(base, FLOAT), ast.Pow(), self._cast(exponent, FLOAT)), FLOAT
        if base[1] is FLOAT or known < 0:
            return ast.BinOp(self._cast(base, FLOAT), ast.Pow(), exponent[0]), FLOAT
        return self._invoke(power, [self._cast(base, INT), exponent[0]]), INT

    def _choice(self, test: Typed, one: Typed, two: Typed) -> Typed:
        (body, orelse), kind = self._to_one_kind([one, two])
        return ast.IfExp(test[0], body, orelse), kind

    def _element(self, node: ast.Subscript) -> Typed:
        """Rewrite table[i], table[i, j] or table[i][j]."""
        indices: list[ast.expr] = []
        table: ast.expr = node
        while isinstance(table, ast.Subscript):
            indices = [*(table.slice.elts if isinstance(table.slice, ast.Tuple) else [table.slice]), *indices]
            table = table.value
        array, kind = self._table(table, len(indices))
        made = [self.expression(index) for index in indices]
        if any(found is FLOAT for _, found in made):
            raise Unknown
        places = [self._cast(index, INT) for index in made]
        return ast.Subscript(array, places[0] if len(places) == 1 else ast.Tuple(places, ast.Load()), ast.Load()), kind

    def _call(self, function: Any, args: list[Typed]) -> Typed:
        if not callable(function):
            raise Unknown
        count, kinds = len(args), [kind for _, kind in args]
        if function is math.log and count == 2:
            return self._binary(ast.Div(), *(self._call(math.log, [arg]) for arg in args))
        if function in FUNCTIONS and FUNCTIONS[function].takes == count:
            implementation, _, kind = FUNCTIONS[function]
            if self.approximate:
                implementation = QUICK.get(implementation, implementation)
            result = self._invoke(implementation, [self._cast(arg, FLOAT) for arg in args])
            return (self._invoke(self.number, [result]), FLOAT) if kind is FLOAT else (result, kind)
        if function in ROUNDINGS and count == 1:
            implementation, kind = ROUNDINGS[function]
            if kinds[0] < FLOAT:
                return self._cast(args[0], kind), kind
            whole = nearest(self.number) if implementation is round else implementation
            # to Numba the floor of a float is a float
            return self._invoke(int if kind is INT else self.number, [self._invoke(whole, [args[0][0]])]), kind
        if function in CONVERSIONS and count == 1:
            kind = CONVERSIONS[function]
            return self._cast(args[0], kind), kind
        if function in (abs, np.abs, math.fabs, np.fabs) and count == 1:
            kind = FLOAT if function in (math.fabs, np.fabs) else max(kinds[0], INT)
            return self._invoke(abs, [self._cast(args[0], kind)]), kind
        if function in EXTREMES and count > 1:
            values, kind = self._to_one_kind(args)
            return self._invoke(EXTREMES[function], values), kind
        if function is np.sign and count == 1:
            return self._invoke(sign(self.number), [self._cast(args[0], FLOAT)]), FLOAT
        if function is np.square and count == 1:
            return self._to_power(args[0], (ast.Constant(2), INT))
        if function in (pow, math.pow, np.power) and count == 2:
            return self._to_power(*args)
        if function is np.where and count == 3:
            return self._choice(*args)
        if function is np.logical_not and count == 1:
            return ast.UnaryOp(ast.Not(), args[0][0]), BOOL
        if function in LOGICAL and count == 2:
            return ast.BoolOp(LOGICAL[function](), [self._cast(arg, BOOL) for arg in args]), BOOL
        if isinstance(function, FunctionType):
            return self._help(function, args, tuple(kinds))
        raise Unknown

    def _clip(self, x: ast.expr, low: ast.expr | None, high: ast.expr | None) -> Typed:
        """Rewrite np.clip(x, low, high); a bound may be None."""
        result = self.expression(x)
        for extreme, bound in ((max, low), (min, high)):
            if bound is not None:
                result = self._call(extreme, [result, self.expression(bound)])
        return result

    def _help(self, function: FunctionType, args: list[Typed], kinds: tuple[Kind, ...]) -> Typed:
        """Rewrite a call of another Python function, which is rewritten for these kinds of arguments."""
        values = [value for value, _ in args]
        if Kind.NOTHING in kinds:  # the next iteration knows more kinds
            return ast.Call(ast.Constant(None), values, []), Kind.NOTHING
        key = (function, kinds)
        if key not in self.helpers:
            self.helpers[key] = None
            typing = _Typing(function, kinds, self.number, self.approximate, self.helpers)
            made = verb(typing.made())
            self.helpers[key] = (made, typing.result)
        found = self.helpers[key]
        if found is None:  # it calls itself
            raise Unknown
        return self._invoke(found[0], values), found[1]

    # --- kinds and names -------------------------------------------------------------------------

    def _to_one_kind(self, parts: list[Typed]) -> tuple[list[ast.expr], Kind]:
        """Convert all expressions to one kind."""
        kind = max(kind for _, kind in parts)
        return [self._cast(part, kind) for part in parts], kind

    def _cast(self, value: Typed, kind: Kind) -> ast.expr:
        node, own = value
        if Kind.NOTHING in (own, kind) or own is kind:
            return node
        if isinstance(node, ast.Constant):
            return self._number({BOOL: bool, INT: int, FLOAT: float}[kind](node.value))[0]
        return self._invoke({BOOL: bool, INT: int, FLOAT: self.number}[kind], [node])

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an expression without variables."""
        if isinstance(node, ast.Constant):
            return node.value
        try:
            return self.source.value(node)
        except LookupError:
            raise Unknown from None

    def _number(self, value: Any) -> Typed:
        """Rewrite a Python number: integers stay, floats become constants of the kernel's type."""
        if isinstance(value, (bool, np.bool_)):
            return ast.Constant(bool(value)), BOOL
        if isinstance(value, (int, np.integer)):
            return ast.Constant(int(value)), INT
        if isinstance(value, (float, np.floating)):
            bound = self._bound(("number", repr(float(value))), "c", self.number(float(value)))
            self.floats[bound.id] = float(value)
            return bound, FLOAT
        raise Unknown

    def _constant(self, value: Typed) -> float:
        """Return the value of a Python number; 0 for everything else."""
        node, kind = value
        if isinstance(node, ast.Constant):
            return float(node.value) if kind is INT else 0.0  # type: ignore[arg-type]
        return self.floats.get(node.id, 0.0) if isinstance(node, ast.Name) else 0.0

    def _table(self, node: ast.expr, rank: int = 1) -> Typed:
        """Return a tuple, list or array of numbers from outside as an array, and the kind of its elements."""
        value = self._value(node)
        if not isinstance(value, (tuple, list, np.ndarray)):
            raise Unknown
        try:
            array = np.asarray(value)
        except ValueError:  # rows of different lengths
            raise Unknown from None
        if array.ndim != rank or array.dtype.kind not in "biuf":
            raise Unknown
        kind = {"b": BOOL, "f": FLOAT}.get(array.dtype.kind, INT)
        if array.dtype.kind != "i":  # Numba makes float64 of unsigned and signed integers
            array = array.astype({BOOL: np.bool_, INT: np.int64, FLOAT: type(self.number(0))}[kind])
        return self._bound(("table", ast.unparse(node)), "table", array), kind

    def _invoke(self, function: Any, args: list[ast.expr]) -> ast.expr:
        """Return a call of a function that may have no name in the user's module."""
        name = "number" if function is self.number else getattr(function, "__name__", "function")
        return ast.Call(self._bound(("function", id(function)), name, function), args, [])

    def _bound(self, key: Any, stem: str, value: Any) -> ast.Name:
        """Return a generated name that is bound to a value."""
        name = self._name(key, stem)
        self.values.setdefault(name, value)
        return _load(name)

    def _name(self, key: Any, stem: str) -> str:
        if key not in self.names:
            self.names[key] = self.fresh(stem)
        return self.names[key]


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())
