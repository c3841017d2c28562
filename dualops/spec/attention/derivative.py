"""d f / d first parameter, generated from f's syntax tree: each value that depends on the parameter gets a slope.

    def f(x, i):                        def f_slope(x, i):
        if i > 3:                           slope_x = 1.0
            y = x * x                       if i > 3:
        else:                                   slope_y = slope_x * x + x * slope_x
            y = math.tanh(x)                    y = x * x
        return y + i                        else:
                                                slope_y = (1 - math.tanh(x) ** 2) * slope_x
                                                y = math.tanh(x)
                                            return slope_y

At a kink of the function (abs, max, a comparison) the slope is that of the side that the function takes.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from .source import Source, build, definition, positional, source_of

# functions of one number x that both modules have; `m` is the function's module
SLOPES = {
    "exp": "m.exp(x)",
    "exp2": "m.exp2(x) * 0.6931471805599453",
    "expm1": "m.exp(x)",
    "log": "1.0 / x",
    "log2": "1.4426950408889634 / x",
    "log10": "0.4342944819032518 / x",
    "log1p": "1.0 / (1.0 + x)",
    "sqrt": "0.5 / m.sqrt(x)",
    "sin": "m.cos(x)",
    "cos": "-m.sin(x)",
    "tan": "1.0 + m.tan(x) ** 2",
    "asin": "1.0 / m.sqrt(1.0 - x * x)",
    "acos": "-1.0 / m.sqrt(1.0 - x * x)",
    "atan": "1.0 / (1.0 + x * x)",
    "sinh": "m.cosh(x)",
    "cosh": "m.sinh(x)",
    "tanh": "1.0 - m.tanh(x) ** 2",
    "fabs": "np.sign(x)",
    "erf": "1.1283791670955126 * m.exp(-x * x)",  # 2 / sqrt(pi)
    "erfc": "-1.1283791670955126 * m.exp(-x * x)",
}
IN_NUMPY = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}  # names that differ
OF_ONE: dict[Any, tuple[str, str]] = {}  # function -> name of its module, slope
for _name, _slope in SLOPES.items():
    OF_ONE[getattr(math, _name)] = ("math", _slope)
    if hasattr(np, IN_NUMPY.get(_name, _name)):
        OF_ONE[getattr(np, IN_NUMPY.get(_name, _name))] = ("np", _slope)
OF_ONE |= dict.fromkeys((abs, np.abs, np.fabs), ("np", "np.sign(x)"))
OF_ONE |= dict.fromkeys((float, np.float32, np.float64), ("np", "1.0"))
OF_ONE[np.square] = ("np", "2.0 * x")

FLAT = {int, bool, round, math.floor, math.ceil, math.trunc, math.isnan, math.isinf, math.isfinite}
FLAT |= {np.floor, np.ceil, np.trunc, np.rint, np.round, np.sign, np.isnan, np.isinf, np.isfinite}
FLAT |= {np.logical_and, np.logical_or, np.logical_not, np.int32, np.int64, np.bool_}

KEPT = (ast.Pass, ast.Break, ast.Continue, ast.Assert, ast.Raise)
ZERO = ast.Constant(0.0)


Assigned = tuple[str, ast.expr | None]  # a variable, and the slope of its value


class Step(NamedTuple):
    """A value and its slope, None if it is 0."""

    value: ast.expr
    slope: ast.expr | None


def slope_of(function: FunctionType, count: int) -> FunctionType:
    """Return the slope of a function along its first parameter, as a function of the same `count` parameters.

    Raises TypeError if the function has no source, or uses an operation without a known slope.
    """
    return build(_Slope(function, count, frozenset({0}), (), {}).made())


class _Slope:
    """Writes the slope of one function, along the parameters whose numbers are in `along`.

    In the outermost function, which has no callers, the slope of the first parameter is 1. In a helper, the slopes of
    its parameters are further parameters, after its own. `helpers`: slopes of helpers that exist already.
    """

    def __init__(
        self,
        function: FunctionType,
        count: int,
        along: frozenset[int],
        callers: tuple[FunctionType, ...],
        helpers: dict[Any, FunctionType],
    ):
        self.function, self.callers, self.helpers = function, (*callers, function), helpers
        try:
            self.source = source_of(function, count)
        except TypeError as error:
            raise TypeError(f"{function.__name__} {error}; {self._advice()}") from None
        self.fresh = self.source.fresh_names()
        self.modules = {"math": self.fresh("math"), "np": self.fresh("np")}
        self.values: dict[str, Any] = {self.modules["math"]: math, self.modules["np"]: np}
        self.given = [self.source.parameters[index] for index in sorted(along)]
        self.slopes: dict[str, str] = {}  # variable -> the name of its slope
        for name in self.given:
            self._has_slope(name)
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.NamedExpr):  # an assignment within an expression that may be skipped
                raise self._unknown(node)

    def made(self) -> Source:
        tree = self.source.tree
        body, known = self._block(tree.body), 0
        while known != len(self.slopes):  # in a loop, a new slope may give one to other variables, also to earlier ones
            known = len(self.slopes)
            body = self._block(tree.body)
        names = list(self.source.parameters)
        head = [self._set([(name, None)]) for name in names if name in self.slopes and name not in self.given]
        if len(self.callers) == 1:
            head.append(self._set([(self.given[0], ast.Constant(1.0))]))
        else:
            names += [self.slopes[name] for name in self.given]
        made = ast.copy_location(definition(f"{tree.name}_slope", positional(names), [*head, *body]), tree)
        values = MappingProxyType({**self.source.values, **self.values})
        return Source(made, values, self.source.globals, self.source.file)

    def _has_slope(self, name: str) -> None:
        if name not in self.slopes:
            self.slopes[name] = self.fresh(f"slope_{name}")

    # --- statements ------------------------------------------------------------------------------

    def _block(self, body: Iterable[ast.stmt]) -> list[ast.stmt]:
        return [made for statement in body for made in self._statement(statement)] or [ast.Pass()]

    def _statement(self, node: ast.stmt) -> Iterator[ast.stmt]:
        match node:
            case ast.Return(value=ast.expr() as value):
                yield ast.copy_location(ast.Return(self.slope(value) or ZERO), node)
            case ast.Assign(targets=targets, value=value):
                yield from self._assigned([pair for target in targets for pair in self._pairs(target, value)], node)
                yield node
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                yield from self._assigned(self._pairs(target, value), node)
                yield ast.copy_location(ast.Assign([target], value), node)
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                result = ast.copy_location(ast.BinOp(ast.copy_location(_load(name), target), op, value), node)
                yield from self._assigned(self._pairs(target, result), node)
                yield node
            case ast.If(test=test, body=body, orelse=orelse):
                otherwise = self._block(orelse) if orelse else []
                yield ast.copy_location(ast.If(test, self._block(body), otherwise), node)
            case ast.While(test=test, body=body, orelse=orelse):
                otherwise = self._block(orelse) if orelse else []
                yield ast.copy_location(ast.While(test, self._block(body), otherwise), node)
            case ast.For(target=target, iter=iterated, body=body, orelse=orelse) if self.slope(iterated) is None:
                reused: list[Assigned] = [(name, None) for name in _names(target) if name in self.slopes]
                inner = [*self._assigned(reused, node), *self._block(body)]
                otherwise = self._block(orelse) if orelse else []
                yield ast.copy_location(ast.For(target, iterated, inner, otherwise), node)
            case ast.Expr():  # a docstring, or a call for its effect
                return
            case _ if isinstance(node, KEPT):
                yield node
            case _:
                raise self._unknown(node)

    def _pairs(self, target: ast.expr, value: ast.expr) -> list[Assigned]:
        """Return (name, slope) for each assigned value; names with a slope are recorded."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            return [pair for parts in zip(target.elts, value.elts) for pair in self._pairs(*parts)]
        slope = self.slope(value)
        if slope is not None:
            if not isinstance(target, ast.Name):
                raise self._unknown(target)
            self._has_slope(target.id)
        return [(name, slope) for name in _names(target)]

    def _assigned(self, pairs: list[Assigned], node: ast.stmt) -> Iterator[ast.stmt]:
        """Yield the statement before an assignment; its value still uses the old variables."""
        if pairs := [pair for pair in pairs if pair[0] in self.slopes]:
            yield ast.copy_location(self._set(pairs), node)

    def _set(self, pairs: list[Assigned]) -> ast.stmt:
        targets: list[ast.expr] = [ast.Name(self.slopes[name], ast.Store()) for name, _ in pairs]
        values = [slope or ZERO for _, slope in pairs]
        if len(pairs) == 1:
            return ast.Assign(targets, values[0])
        return ast.Assign([ast.Tuple(targets, ast.Store())], ast.Tuple(values, ast.Load()))

    # --- expressions -----------------------------------------------------------------------------

    def slope(self, node: ast.expr) -> ast.expr | None:
        """Return the slope of an expression, None if it is 0 everywhere."""
        match node:
            case ast.Name(id=name):
                return _load(self.slopes[name]) if name in self.slopes else None
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return None
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
                slope = self.slope(operand)
                return None if slope is None else ast.copy_location(ast.UnaryOp(op, slope), node)
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(node, op, Step(left, self.slope(left)), Step(right, self.slope(right)))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                one, two = self.slope(body), self.slope(orelse)
                if one is None and two is None:
                    return None
                return ast.copy_location(ast.IfExp(test, one or ZERO, two or ZERO), node)
            case ast.Call() if clipped := self.source.clipped(node):
                return self._clip(node, *clipped)
            case ast.Call(func=function, args=args, keywords=keywords):
                steps = [Step(arg, self.slope(arg)) for arg in args]
                if all(self.slope(keyword.value) is None for keyword in keywords):
                    if all(step.slope is None for step in steps):
                        if self._is_constant(function):
                            return None
                    elif not keywords:
                        return self._call(node, function, steps)
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                if self._is_constant(node):
                    return None
            case _:
                if all(
                    self.slope(child) is None for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)
                ):
                    return None
        raise self._unknown(node)

    def _is_constant(self, node: ast.expr) -> bool:
        """Whether no variable in the expression has a slope."""
        return not any(isinstance(part, ast.Name) and part.id in self.slopes for part in ast.walk(node))

    def _binary(self, node: ast.BinOp, op: ast.operator, a: Step, b: Step) -> ast.expr | None:
        if a.slope is None and b.slope is None:
            return None
        write = self._writer(node, a=a.value, b=b.value, da=a.slope, db=b.slope)
        which = "both" if a.slope and b.slope else "a" if a.slope else "b"
        match op, which:
            case ((ast.Add() | ast.Sub() | ast.Mod()), "a"):
                return a.slope
            case ast.Add(), "b":
                return b.slope
            case ast.Sub(), "b":
                return write("-db")
            case ast.Add(), "both":
                return write("da + db")
            case ast.Sub(), "both":
                return write("da - db")
            case ast.Mult(), _:
                return write({"a": "da * b", "b": "a * db", "both": "da * b + a * db"}[which])
            case ast.Div(), _:
                return write({"a": "da / b", "b": "-(a / b) * db / b", "both": "(da - a / b * db) / b"}[which])
            case ast.FloorDiv(), _:
                return None
            case ast.Pow(), "a":
                return self._power(node, a, b)
            case ast.Pow(), "b":
                return write("a ** b * np.log(a) * db")
            case ast.Pow(), "both":
                return write("a ** b * np.log(a) * db + b * a ** (b - 1) * da")
        raise self._unknown(node)

    def _power(self, node: ast.expr, a: Step, b: Step) -> ast.expr | None:
        """Return the slope of a ** b along a."""
        write = self._writer(node, a=a.value, b=b.value, da=a.slope)
        try:
            exponent = ast.literal_eval(b.value)
        except ValueError:
            return write("b * a ** (b - 1) * da")
        if exponent in (0, 1, 2):
            return {0: None, 1: a.slope, 2: write("2.0 * a * da")}[int(exponent)]
        return write(f"{exponent!r} * a ** {exponent - 1!r} * da")

    def _call(self, node: ast.Call, called: ast.expr, args: list[Step]) -> ast.expr | None:
        """Return the slope of a call with some arguments that have one."""
        try:
            function = self.source.value(called)
            hash(function)
        except (LookupError, TypeError):
            raise self._unknown(node) from None
        if any(isinstance(arg.value, ast.Starred) for arg in args):
            raise self._unknown(node)
        first, *others = args
        if function in FLAT:
            return None
        if function in OF_ONE and not others:
            module, slope = OF_ONE[function]
            write = self._writer(node, module, x=first.value, dx=first.slope)
            return write(f"({slope}) * dx")
        if function is math.log and len(args) == 2 and others[0].slope is None:
            return self._writer(node, x=first.value, dx=first.slope, base=others[0].value)("dx / (x * np.log(base))")
        if function in (pow, math.pow, np.power) and len(args) == 2:
            power = ast.copy_location(ast.BinOp(first.value, ast.Pow(), others[0].value), node)
            return self._binary(power, power.op, *args)
        if function in (min, max, np.minimum, np.maximum) and others:
            return reduce(lambda one, two: self._chosen(node, function, called, one, two), args).slope
        if function is np.where and len(args) == 3:
            condition, one, two = args
            write = self._writer(node, c=condition.value, da=one.slope or ZERO, db=two.slope or ZERO)
            return write("np.where(c, da, db)")
        if isinstance(function, FunctionType) and function not in self.callers:
            return self._helper(node, function, args)
        raise self._unknown(node)

    def _clip(self, node: ast.Call, x: ast.expr, low: ast.expr | None, high: ast.expr | None) -> ast.expr | None:
        """Return the slope of np.clip(x, low, high); a bound may be None."""
        dx, tests = self.slope(x), [text for text, bound in (("(x >= low)", low), ("(x <= high)", high)) if bound]
        if any(bound and self.slope(bound) for bound in (low, high)):
            raise self._unknown(node)
        if dx is None or not tests:
            return dx
        return self._writer(node, x=x, dx=dx, low=low, high=high)(f"np.where({' & '.join(tests)}, dx, 0.0)")

    def _chosen(self, node: ast.expr, function: Callable[..., Any], called: ast.expr, one: Step, two: Step) -> Step:
        """Return the slope of min or max; Python takes the first of two equal values."""
        value = ast.copy_location(ast.Call(called, [one.value, two.value], []), node)
        write = self._writer(node, a=one.value, b=two.value, da=one.slope or ZERO, db=two.slope or ZERO)
        test = "b > a" if function in (max, np.maximum) else "b < a"
        return Step(value, write(f"db if {test} else da" if function in (min, max) else f"np.where({test}, db, da)"))

    def _helper(self, node: ast.Call, function: FunctionType, args: list[Step]) -> ast.expr:
        """Return the slope of a call of a Python function, whose own slope is generated too."""
        along = frozenset(index for index, arg in enumerate(args) if arg.slope is not None)
        key = (function, len(args), along)
        if key not in self.helpers:
            self.helpers[key] = build(_Slope(*key, self.callers, self.helpers).made())
        made = self.helpers[key]
        name = next((name for name, value in self.values.items() if value is made), None) or self.fresh(made.__name__)
        self.values[name] = made
        given = [arg.value for arg in args] + [arg.slope for arg in args if arg.slope is not None]
        return ast.copy_location(ast.Call(_load(name), given, []), node)

    def _writer(self, node: ast.expr, module: str = "np", **parts: ast.expr | None) -> Callable[[str], ast.expr]:
        """Return a function from an expression's text to its tree, with trees in place of the names in `parts`."""
        names = {**parts, "m": _load(self.modules[module]), "np": _load(self.modules["np"])}

        class Fill(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                return names[node.id] or node

        def write(text: str) -> ast.expr:
            tree = ast.parse(text, mode="eval").body
            for part in ast.walk(tree):
                ast.copy_location(part, node)
            return Fill().visit(tree)

        return write

    def _unknown(self, node: ast.AST) -> TypeError:
        place = f"{self.source.file}, line {getattr(node, 'lineno', '?')}"
        text = ast.unparse(node).partition("\n")[0]
        return TypeError(f"{self.function.__name__}: `{text}` ({place}) has no known derivative; {self._advice()}")

    def _advice(self) -> str:
        return f"give a pair ({self.callers[0].__name__}, derivative)"


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _names(target: ast.expr) -> list[str]:
    return [part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
