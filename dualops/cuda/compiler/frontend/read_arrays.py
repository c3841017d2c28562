"""Arrays that a user's function reads: in global memory, each of them once.

Numba writes an array out at every place where it is read, into constant memory, which ends at 64 KB and serves a warp
one address at a time. A function that is inlined at several places reads its arrays at all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.descriptor import cuda_target

GLOBAL = 1  # NVVM's number of the address space
BYTE = ir.IntType(8)


@contextmanager
def in_global_memory() -> Iterator[None]:
    """Inside the with statement, which must have Numba's lock, the kernels that are compiled have them there."""
    target = cuda_target.target_context
    target.make_constant_array = _array
    try:
        yield
    finally:
        del target.make_constant_array  # the class has its own


def _array(builder: Any, kind: Any, array: Any) -> Any:
    """What `CUDATargetContext.make_constant_array` gives, of another variable."""
    target = cuda_target.target_context
    if any(stride < 0 for stride in array.strides) or not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = array.copy(order="C")
    nbytes = target.get_abi_sizeof(target.get_data_type(kind.dtype))
    place = builder.addrspacecast(_variable(builder.module, array, nbytes), ir.PointerType(BYTE), "generic")
    made = target.make_array(kind)(target, builder)
    target.populate_array(
        made,
        data=builder.bitcast(place, made.data.type),
        shape=[target.get_constant(types.intp, size) for size in array.shape],
        strides=[target.get_constant(types.intp, stride) for stride in array.strides],
        itemsize=made.itemsize,
        parent=made.parent,
        meminfo=None,
    )
    return made._getvalue()


def _variable(module: Any, array: Any, alignment: int) -> Any:
    """The variable that has these bytes, a new one if the module has none."""
    data = array.tobytes(order="A")
    name = f"array_{hashlib.sha256(data).hexdigest()[:24]}_{alignment}"
    found = module.globals.get(name)
    if found is None:
        kind = ir.ArrayType(BYTE, len(data))
        found = ir.GlobalVariable(module, kind, name, addrspace=GLOBAL)
        found.linkage, found.global_constant, found.align = "internal", True, 1 << (alignment - 1).bit_length()
        found.initializer = ir.Constant(kind, bytearray(data))
    return found
