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


def division(context: Any, fn: Any, sig: Any, otherwise: Callable[..., Any]) -> Callable[..., Any] | None:
    """What divides integers, or None if `fn` does something else. otherwise: Numba's, for divisors that vary."""
    key = getattr(fn, "typing_key", fn)
    if key not in QUOTIENT and key not in REMAINDER:
        return None
    if any(type(each) is not types.Integer for each in (sig.return_type, *sig.args)):
        return None
    return partial(_divide, context, sig, key in QUOTIENT, otherwise)


def _divide(context: Any, sig: Any, quotient: bool, otherwise: Any, builder: Any, args: Any, loc: Any = None) -> Any:
    of = sig.return_type
    x, y = (context.cast(builder, value, kind, of) for value, kind in zip(args, sig.args, strict=True))
    if not isinstance(y, ir.Constant) or not isinstance(y.constant, int) or y.constant in (0, -1):
        return otherwise(builder, args, loc)
    if not of.signed:
        return (builder.udiv if quotient else builder.urem)(x, y)
    # with fewer blocks still, NVVM puts some instructions in another order
    return int_divmod_signed(context, builder, of, x, y)[0 if quotient else 1]
