"""Shorter forms of three operations: loops over a range, elements of arrays, and divisions by a constant.

Loops. Numba copies a range, its iterator, and each pair of an element and whether there is one, from struct to struct:
two thirds of the instructions of a loop. LLVM then removes the copies. Here: Numba's blocks and arithmetic with fewer
structs. What stays on the stack has to: an iterator and a pair, since LLVM's order of passes depends on them.

Elements of one-dimensional arrays. Numba splits an array into its seven fields and rebuilds it through the stack: 30
instructions for each element, which LLVM then removes. Here: a pointer out of the array, an addition, and the load or
store. Of these two, the machine code is the same as Numba's.

Divisions. Here is Numba's form without the case of a divisor that is 0, three of eight blocks. NVVM's time grows faster
than the number of blocks: with a softcap, divisions were half of those of a gradient of attention, and NVVM took 12 of
its 20 seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.cuda import cgutils
from numba.cuda.np.arrayobj import load_item, store_item

I64 = ir.IntType(64)
PAIR = ("pair_first", "pair_second")
QUOTIENT = {operator.floordiv, operator.ifloordiv}
REMAINDER = {operator.mod, operator.imod}


def slot(builder: Any, kind: Any, name: str = "") -> Any:
    """Return the address of a new place on the stack, in the function's first block. kind: the type of LLVM's.

    It is written before it is read, so without the zero that Numba stores in each: LLVM removes the zero, after a walk
    through the kernel's blocks for each.
    """
    with builder.goto_entry_block():
        return builder.alloca(kind, name=name)


# --- loops over a range ----------------------------------------------------------------------------


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


# --- elements of arrays ----------------------------------------------------------------------------


def element(context: Any, fn: Any, sig: Any) -> Callable[..., Any] | None:
    """Return the function that emits the read or write of an element of a contiguous array, otherwise None."""
    key, args = getattr(fn, "typing_key", fn), sig.args
    if context.enable_boundscheck:
        return None
    if key is operator.getitem and len(args) == 2 and _plain(*args):
        return partial(_get, context, *args)
    if key is operator.setitem and len(args) == 3 and _plain(*args[:2]):
        return partial(_set, context, *args)
    return None


def _plain(array: Any, index: Any) -> bool:
    if type(array) is not types.Array or type(index) is not types.Integer:
        return False
    of = isinstance(array.dtype, (types.Number, types.Boolean))
    return of and array.ndim == 1 and array.layout == "C" and array.aligned


def _get(context: Any, array: Any, kind: Any, builder: Any, args: Any, loc: Any = None) -> Any:
    return load_item(context, builder, array, _place(context, builder, array, kind, *args))


def _set(context: Any, array: Any, kind: Any, of: Any, builder: Any, args: Any, loc: Any = None) -> None:
    place = _place(context, builder, array, kind, *args[:2])
    store_item(context, builder, array, context.cast(builder, args[2], of, array.dtype), place)


def _place(context: Any, builder: Any, array: Any, kind: Any, value: Any, index: Any) -> Any:
    """The element's address. A negative index counts from the end, as in Python."""
    index = context.cast(builder, index, kind, types.intp if kind.signed else types.uintp)
    if kind.signed and not (isinstance(index, ir.Constant) and index.constant >= 0):
        size = builder.extract_value(value, [field(context, array, "shape"), 0])
        index = builder.select(builder.icmp_signed("<", index, I64(0)), builder.add(index, size), index)
    return builder.gep(builder.extract_value(value, field(context, array, "data")), [index])


def field(context: Any, array: Any, name: str) -> int:
    """Return the index of this field in an array's struct."""
    return context.data_model_manager[array].get_field_position(name)


# --- divisions by a constant -----------------------------------------------------------------------


def division(
    context: Any, fn: Any, sig: Any, otherwise: Callable[..., Any], *, by_selection: bool
) -> Callable[..., Any] | None:
    """Return the function that emits a division of integers, or None if `fn` does something else.

    otherwise: Numba's function, for divisors that vary. by_selection: emit selections instead of branches. NVVM then
    orders some instructions differently.
    """
    key = getattr(fn, "typing_key", fn)
    if key not in QUOTIENT and key not in REMAINDER:
        return None
    if any(type(each) is not types.Integer for each in (sig.return_type, *sig.args)):
        return None
    return partial(_divide, context, sig, key in QUOTIENT, otherwise, _selected if by_selection else _branched)


def _divide(
    context: Any, sig: Any, quotient: bool, otherwise: Any, signed: Any, builder: Any, args: Any, loc: Any = None
) -> Any:
    of = sig.return_type
    x, y = (context.cast(builder, value, kind, of) for value, kind in zip(args, sig.args, strict=True))
    if not isinstance(y, ir.Constant) or not isinstance(y.constant, int) or y.constant in (0, -1):
        return otherwise(builder, args, loc)
    if not of.signed:
        return (builder.udiv if quotient else builder.urem)(x, y)
    return signed(context, builder, of, x, y)[0 if quotient else 1]


def _branched(context: Any, builder: Any, of: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Quotient and remainder in the blocks of Numba's `int_divmod_signed`."""
    places = slot(builder, y.type), slot(builder, y.type)
    for place in places:
        builder.store(y.type(0), place)
    overflows = builder.and_(builder.icmp_signed("==", x, x.type(of.minval)), builder.icmp_signed("==", y, y.type(-1)))
    with builder.if_then(builder.not_(overflows), likely=True):
        whole, rest, below = _towards_zero(builder, x, y)
        with builder.if_else(below) as (then, otherwise):
            with otherwise:
                builder.store(whole, places[0])
                builder.store(rest, places[1])
            with then:
                builder.store(builder.sub(whole, y.type(1)), places[0])
                builder.store(builder.add(rest, y), places[1])
    return builder.load(places[0]), builder.load(places[1])


def _selected(context: Any, builder: Any, of: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """The same without blocks, and without the overflow that a divisor of -1 alone makes."""
    whole, rest, below = _towards_zero(builder, x, y)
    return (
        builder.select(below, builder.sub(whole, y.type(1)), whole),
        builder.select(below, builder.add(rest, y), rest),
    )


def _towards_zero(builder: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
    """The quotient rounded towards 0, its remainder, and whether the floor is one less: the remainder has another sign
    than the divisor.
    """
    whole, rest = builder.sdiv(x, y), builder.srem(x, y)
    differs = builder.icmp_signed("<", builder.xor(y, rest), y.type(0))
    return whole, rest, builder.and_(builder.icmp_signed("!=", rest, y.type(0)), differs)
