"""Addresses that kernels read from tables in memory. No instructions: compiled, they are plain loads and stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from ..compiler.backend import SIMULATED
from ..simulator import located


def array_at(element: Any) -> Callable[..., Any]:
    """What makes an array of `element`, a Numba scalar type, out of the address of its first one in global memory.

    Compiled, it is the same 64 bits. In the simulator it is the array of the launch that lies there.
    """
    if SIMULATED:
        return located
    from numba.cuda.extending import intrinsic

    def array_at(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            generic = context.get_value_type(signature.return_type)
            in_global = ir.PointerType(generic.pointee, addrspace=1)
            return builder.addrspacecast(builder.inttoptr(values[0], in_global), generic)

        return types.CPointer(element)(types.int64), generate

    return intrinsic(array_at)


def _store_words() -> Callable[..., None]:
    """What writes a tuple of int64 to an array of them, from `index` on: (array, index, words).

    A store for each word, since a tuple that is indexed by a variable becomes a chain of comparisons.
    """
    if SIMULATED:

        def store_each(array: Any, index: int, words: tuple[int, ...]) -> None:
            for k, word in enumerate(words):
                array[index + k] = word

        return store_each
    from numba.cuda.extending import intrinsic

    def store_words(context: Any, array: Any, index: Any, words: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            start = builder.gep(values[0], [values[1]])
            for k in range(len(words)):
                builder.store(builder.extract_value(values[2], k), builder.gep(start, [ir.IntType(64)(k)]))
            return context.get_dummy_value()

        return types.void(array, types.int64, words), generate

    return intrinsic(store_words)


store_words = _store_words()
