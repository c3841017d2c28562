"""Integers divided by a constant: Numba's form without the case of a divisor that is 0, three of eight blocks.

NVVM's time grows faster than the number of blocks: with a softcap, divisions were half of those of a gradient of
attention, and NVVM took 12 of its 20 seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import types

from .slots import slot

QUOTIENT = {operator.floordiv, operator.ifloordiv}
REMAINDER = {operator.mod, operator.imod}


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
