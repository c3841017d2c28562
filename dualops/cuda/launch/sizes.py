"""Sizes that record what is computed from them, so that a call of other sizes needs no new planning.

The grid, the arguments and the results of a call are functions of its arrays' shapes and strides. So is the choice of a
kernel, but one kernel serves wide ranges. A `Trace` makes sizes that compute like integers, and records each
operation, and each question (is it less, equal, 0?) with its answer. `Trace.function` turns the record into a function
that computes the same results for other shapes and strides, or returns None if a question has another answer.

    trace = Trace()
    M, N = trace.size(300), trace.size(64)
    blocks = -(-M // 4) if N <= 128 else M
    trace.function((blocks, M * N))     # s -> None if not s[1] <= 128, else (-(-s[0] // 4), s[0] * s[1])

Code may need the number itself: as an index, in a text, for NumPy, to build a kernel. That records the question "is it
this number?". So code that reads a size can make the function less general, but never wrong. A size has no hash: to use
sizes as a dictionary key, convert them to numbers first (`concrete`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple


class Line(NamedTuple):
    """A line of the function: what it computes (None: it is a question), and from which operands."""

    text: str
    term: str | None
    uses: tuple[str | int, ...]


Method = Callable[["Size", Any], Any]


def _computes(symbol: str, operation: Callable[[Any, Any], Any]) -> tuple[Method, Method]:
    """Return the methods of an operator for a size on the left and on the right."""

    def on_the_left(self: Size, other: Any) -> Any:
        return self.trace.compute(symbol, operation, self, other)

    def on_the_right(self: Size, other: Any) -> Any:
        return self.trace.compute(symbol, operation, other, self)

    return on_the_left, on_the_right


def _asks(symbol: str, operation: Callable[[Any, Any], Any]) -> Method:
    return lambda self, other: self.trace.ask(symbol, operation, self, other)


class Size:
    """An integer of a traced call."""

    __slots__ = ("term", "trace", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, term: str, value: int):
        self.trace, self.term, self.value = trace, term, value

    __add__, __radd__ = _computes("+", operator.add)
    __sub__, __rsub__ = _computes("-", operator.sub)
    __mul__, __rmul__ = _computes("*", operator.mul)
    __floordiv__, __rfloordiv__ = _computes("//", operator.floordiv)
    __mod__, __rmod__ = _computes("%", operator.mod)
    __lshift__, __rlshift__ = _computes("<<", operator.lshift)
    __rshift__, __rrshift__ = _computes(">>", operator.rshift)
    __and__, __rand__ = _computes("&", operator.and_)
    __or__, __ror__ = _computes("|", operator.or_)
    __lt__, __le__ = _asks("<", operator.lt), _asks("<=", operator.le)
    __gt__, __ge__ = _asks(">", operator.gt), _asks(">=", operator.ge)
    __eq__, __ne__ = _asks("==", operator.eq), _asks("!=", operator.ne)  # type: ignore[assignment]

    def __neg__(self) -> Any:
        return 0 - self

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        """Return the number. From here on the function is for this number only."""
        self.trace.ask("==", operator.eq, self, self.value)
        return self.value

    def __float__(self) -> float:
        return float(self.__index__())

    def __truediv__(self, other: Any) -> Any:
        return self.__index__() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.__index__()

    def __repr__(self) -> str:
        return repr(self.__index__())

    def __format__(self, spec: str) -> str:
        return format(self.__index__(), spec)


class Trace:
    """The record of one call."""

    def __init__(self) -> None:
        self.sizes = 0
        self.lines: list[Line] = []
        self.terms: dict[str, str] = {}  # computation -> the variable that holds its result
        self.answered: set[str] = set()
        self.same: dict[str, Any] = {}  # variable -> the number or other variable that it equals

    def size(self, value: int) -> Size:
        """Return the size of the function's next argument."""
        self.sizes += 1
        return Size(self, f"s{self.sizes - 1}", value)

    def compute(self, symbol: str, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """Return the result of an operation on sizes and integers. For other operands it uses the number."""
        if not (self._knows(left) and self._knows(right)):
            return operation(concrete(left), concrete(right))
        result = operation(_value(left), _value(right))
        one, other = self._term(left), self._term(right)
        if type(one) is int and type(other) is int:
            return result
        if (other == 1 and symbol in ("*", "//")) or (other == 0 and symbol in ("+", "-")):
            return left
        if (one == 1 and symbol == "*") or (one == 0 and symbol == "+"):
            return right
        text = f"{_literal(one)} {symbol} {_literal(other)}"
        term = self.terms.get(text)
        if term is None:
            term = self.terms[text] = f"v{len(self.terms)}"
            self.lines.append(Line(f"{term} = {text}", term, (one, other)))
        return Size(self, term, result)

    def ask(self, symbol: str, operation: Callable[[Any, Any], bool], left: Any, right: Any) -> Any:
        """Return the answer to a question about sizes and integers."""
        if not (self._knows(left) and self._knows(right)):
            return operation(concrete(left), concrete(right))
        answer = operation(_value(left), _value(right))
        one, other = self._term(left), self._term(right)
        if one == other or (type(one) is int and type(other) is int):
            return answer
        question = f"{_literal(one)} {symbol} {_literal(other)}"
        if question not in self.answered:
            self.answered.add(question)
            self.lines.append(Line(f"if {'not ' * answer}{question}: return None", None, (one, other)))
            if (symbol == "==") == answer and symbol in ("==", "!="):
                # the later variable is the earlier one, or a number, from here on
                later, earlier = (one, other) if isinstance(one, str) else (other, one)
                self.same[str(later)] = earlier
        return answer

    def _knows(self, value: Any) -> bool:
        if isinstance(value, Size) and value.trace is not self:
            raise RuntimeError("a size of one traced call has got into another: something keeps sizes")
        return type(value) in (Size, int, bool)

    def _term(self, size: Any) -> str | int:
        """Return a variable, or its number if known."""
        term = size.term if isinstance(size, Size) else int(size)
        while term in self.same:
            term = self.same[term]
        return term

    def function(self, result: Any) -> Callable[[Sequence[int]], Any]:
        """Return a function from other sizes to `result`, nested tuples and lists of sizes and other values.

        It returns None if a question has another answer.
        """
        kept: dict[str, Any] = {}
        used: set[Any] = set()
        made = self._text(result, kept, used)
        lines = []
        for line in reversed(self.lines):
            if line.term is None or line.term in used:
                used.update(line.uses)
                lines.append(line.text)
        taken = f"{', '.join(f's{i}' for i in range(self.sizes))}, = s" if self.sizes else "pass"
        body = "\n    ".join([taken, *reversed(lines), f"return {made}"])
        exec(compile(f"def function(s):\n    {body}\n", "<traced sizes>", "exec"), kept)
        return kept["function"]

    def _text(self, value: Any, kept: dict[str, Any], used: set[Any]) -> str:
        """Return the text of `value` in the function. Adds values without a text to `kept`, and variables to `used`."""
        if isinstance(value, Size):
            used.add(term := self._term(value))
            return _literal(term)
        if type(value) in (int, str, bool, type(None)):
            return repr(value)
        if isinstance(value, (list, tuple)):
            parts = ", ".join(self._text(part, kept, used) for part in value)
            if hasattr(value, "_fields"):
                return f"{self._text(type(value), kept, used)}({parts})"
            return f"[{parts}]" if isinstance(value, list) else f"({parts}{',' * (len(value) == 1)})"
        name = f"c{len(kept)}"
        kept[name] = value
        return name


def concrete(value: Any) -> Any:
    """Return a value with numbers in place of sizes, also inside tuples and dataclasses. Their traces record it."""
    if isinstance(value, Size):
        return value.__index__()
    if isinstance(value, tuple):
        parts = [concrete(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        numbers = {name: concrete(part) for name, part in own.items()}
        return replace(value, **numbers) if any(numbers[name] is not own[name] for name in own) else value
    return value


def _value(size: Any) -> Any:
    return size.value if isinstance(size, Size) else size


def _literal(term: str | int) -> str:
    return term if isinstance(term, str) else f"({term})" if term < 0 else str(term)
