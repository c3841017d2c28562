"""Elements of one-dimensional arrays: a pointer out of the array, an addition, and the load or store.

Numba splits an array into its seven fields and rebuilds it through the stack: 30 instructions for each element. LLVM
then removes them. The machine code is the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.cuda.np.arrayobj import load_item, store_item

I64 = ir.IntType(64)


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
