"""Parameters of a kernel that are 128 bytes: tensor maps, which come with a launch as its numbers do.

It is `const __grid_constant__ CUtensorMap` of CUDA C++: to the kernel's own code an integer, the address of bytes that
nobody may write. Numba has no such parameters, so its type `backend.tensor_map` gets a model of data here.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import cgutils
from numba.cuda.datamodel import models
from numba.cuda.descriptor import cuda_target

from ..backend import TensorMapType

BYTES = ir.ArrayType(ir.IntType(8), TensorMapType.nbytes).as_pointer()


class TensorMapModel(models.PrimitiveModel):
    """An integer everywhere but among a kernel's arguments, where it is a pointer to the bytes."""

    def __init__(self, manager: Any, numba_type: Any):
        super().__init__(manager, numba_type, ir.IntType(64))

    def get_argument_type(self) -> Any:
        return BYTES

    def as_argument(self, builder: Any, value: Any) -> Any:
        return builder.inttoptr(value, BYTES)

    def from_argument(self, builder: Any, value: Any) -> Any:
        return builder.ptrtoint(value, self.be_type)


class ByValue(ir.ArgumentAttributes):
    """The attribute `byval` without a type, as in NVVM's IR, whose LLVM is older than llvmlite's."""

    def _to_list(self, typ: Any) -> list[str]:
        return ["byval", f"align {TensorMapType.alignment}"]


def take_by_value(entry: Any) -> None:
    """Have a kernel's parameters of that type passed by value, and read where the driver puts them."""
    numbers = [number for number, arg in enumerate(entry.args, 1) if arg.type == BYTES]
    if not numbers:
        return
    for number in numbers:
        entry.args[number - 1].attributes = ByValue()
    module = entry.module
    which = module.add_metadata([ir.Constant(ir.IntType(32), number) for number in numbers])
    entry_data = module.add_metadata((entry, ir.MetaDataString(module, "grid_constant"), which))
    cgutils.get_or_insert_named_metadata(module, "nvvm.annotations").add(entry_data)


cuda_target.target_context.data_model_manager.register(TensorMapType, TensorMapModel)
