"""Loops over a range of integers: Numba's blocks and arithmetic, with fewer structs on the stack.

Numba copies a range, its iterator, and each pair of an element and whether there is one, from struct to struct: two
thirds of the instructions of a loop. LLVM then removes the copies. The machine code is the same. What stays on the
stack has to: an iterator and a pair, since LLVM's order of passes depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.cuda import cgutils

from .slots import slot

PAIR = ("pair_first", "pair_second")


def loop(context: Any, fn: Any, sig: Any) -> Callable[..., Any] | None:
    """Return the function that emits a range, its iterator, or the next element of it. None for any other `fn`."""
    if fn == "getiter" and isinstance(sig.args[0], types.RangeType):
        return partial(_iterator, context)
    if fn == "iternext" and isinstance(sig.args[0], types.RangeIteratorType):
        return partial(next_element, False)
    if getattr(fn, "typing_key", fn) is range and all(type(each) is types.Integer for each in sig.args):
        return _range
    return None


def has_constants(made: Any) -> bool:
    """Return whether the numbers of a range are constants."""
    numbers = []
    while isinstance(made, ir.InsertValue):
        numbers.append(made.operands[1])
        made = made.operands[0]
    return bool(numbers) and all(isinstance(number, ir.Constant) for number in numbers)


def _struct(builder: Any, *fields: Any) -> Any:
    made = ir.Constant(ir.LiteralStructType([each.type for each in fields]), ir.Undefined)
    for place, value in enumerate(fields):
        made = builder.insert_value(made, value, place)
    return made


def _range(builder: Any, args: Sequence[Any], loc: Any = None) -> Any:
    kind = args[0].type
    start, stop, step = {1: (kind(0), *args, kind(1)), 2: (*args, kind(1)), 3: args}[len(args)]
    return _struct(builder, start, stop, step)


def _iterator(context: Any, builder: Any, args: Sequence[Any], loc: Any = None) -> Any:
    """The addresses of the next element and of the number of elements left, with `stop` and `step`."""
    start, stop, step = (builder.extract_value(args[0], place) for place in range(3))
    zero, one = start.type(0), start.type(1)
    element = cgutils.alloca_once(builder, start.type)
    builder.store(start, element)
    left = cgutils.alloca_once(builder, start.type)
    length = builder.sub(stop, start)
    rising = builder.icmp_signed(">", length, zero)
    differs = builder.xor(rising, builder.icmp_signed(">", step, zero))
    with cgutils.if_unlikely(builder, builder.icmp_unsigned("==", step, zero)):
        context.fndesc.call_conv.return_user_exc(builder, ValueError, ("range() arg 3 must not be zero",))
    with builder.if_else(differs) as (then, otherwise):
        with then:
            builder.store(zero, left)
        with otherwise:
            rest = builder.srem(length, step)
            uneven = builder.icmp_signed(">", builder.select(rising, rest, builder.neg(rest)), zero)
            builder.store(builder.add(builder.sdiv(length, step), builder.select(uneven, one, zero)), left)
    return _struct(builder, element, stop, step, left)


def next_element(straight: bool, builder: Any, args: Sequence[Any], loc: Any = None) -> Any:
    """The next element of an iterator, and whether there is one. straight: the iterator counts on after its end, too:
    newer versions of LLVM find out only then how often a loop runs, and unroll it.
    """
    element, step, left = (builder.extract_value(args[0], place) for place in (0, 2, 3))
    kind = element.type.pointee
    pair = slot(builder, ir.LiteralStructType([kind, ir.IntType(1)]))
    builder.store(pair.type.pointee(None), pair)
    first, second = (cgutils.gep_inbounds(builder, pair, 0, place) for place in range(2))
    count = builder.load(left)
    valid = builder.icmp_signed(">", count, kind(0))
    builder.store(valid, second)
    with nullcontext() if straight else builder.if_then(valid):
        value = builder.load(element)
        builder.store(value, first)
        builder.store(builder.sub(count, kind(1), flags=["nsw"]), left)
        builder.store(builder.add(value, step), element)
    return builder.load(pair)
