"""Addresses that kernels read from tables in memory. No instructions: compiled, they are plain loads and stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from ..compiler.backend import SIMULATED
from ..simulator import located


def array_at(element: Any) -> Callable[..., Any]:
    """Return the verb that makes an array of `element`, a Numba scalar type, from its address in global memory.

    Compiled, the array is the same 64 bits. In the simulator, it is the launch's array at this address.
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
    """Return the verb (array, index, words), which writes a tuple of int64 to an array from `index` on.

    It has one store per word, since indexing a tuple by a variable becomes a chain of comparisons.
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
