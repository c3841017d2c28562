"""Integers divided by a constant: Numba's form without the case of a divisor that is 0, three of eight blocks.

NVVM's time grows faster than the number of blocks: with a softcap, divisions were half of those of a gradient of
attention, and NVVM took 12 of its 20 seconds.
"""

# numba-cuda takes the place of numba's own `numba.cuda` when Python runs, which pyright does not see:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.cuda.cpython.numbers import int_divmod_signed

QUOTIENT = {operator.floordiv, operator.ifloordiv}
REMAINDER = {operator.mod, operator.imod}


def division(
    context: Any, fn: Any, sig: Any, otherwise: Callable[..., Any], by_selection: bool
) -> Callable[..., Any] | None:
    """What divides integers, or None if `fn` does something else. otherwise: Numba's, for divisors that vary.

    by_selection: without blocks, from which NVVM makes some instructions in another order.
    """
    key = getattr(fn, "typing_key", fn)
    if key not in QUOTIENT and key not in REMAINDER:
        return None
    if any(type(each) is not types.Integer for each in (sig.return_type, *sig.args)):
        return None
    return partial(_divide, context, sig, key in QUOTIENT, otherwise, _selected if by_selection else int_divmod_signed)


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


def _selected(context: Any, builder: Any, of: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Quotient and remainder, as `int_divmod_signed` but for the overflow that a divisor of -1 alone makes."""
    whole, rest = builder.sdiv(x, y), builder.srem(x, y)
    # rounded towards 0; the floor is one less where the remainder has another sign than the divisor
    differs = builder.icmp_signed("<", builder.xor(y, rest), y.type(0))
    below = builder.and_(builder.icmp_signed("!=", rest, y.type(0)), differs)
    one = y.type(1)
    return (
        builder.select(below, builder.sub(whole, one), whole),
        builder.select(below, builder.add(rest, y), rest),
    )
