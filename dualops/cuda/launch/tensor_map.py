"""Tensor maps describe an array for TMA copies (`ptx.tma`): 128 bytes for a GPU, a record for the simulator.

    boxes = boxes_of("bfloat16", (M, K), (K, 1), (BLOCK_M, 64), 128)     validated once for a shape
    boxes.encoded(address)                                               128 bytes, for another address at each call

A kernel's parameter of type `backend.tensor_map` is such bytes, which the driver copies when it launches. Shapes,
strides and boxes have the array's last axis last, strides in elements; a kernel's coordinates have it first. NVIDIA
CUDA Driver API 13.0, section 6.31, says what can be encoded.

A rung declares the maps that it needs, `Choice(..., maps={"a_map": Mapped("a", ...)})`, and names them among its
kernels' arguments like arrays. A map depends only on the array's address and layout. A launch passes it by value, like
numbers, and a captured graph keeps it: nothing is written to the device before the kernel, and nothing is kept there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ...spec.meta import itemsize, numpy_dtype
from ..simulator import TensorMap
from . import driver

NBYTES = 128
ADDRESS_MULTIPLE = 16  # bytes: an array's address and its strides are multiples
MOST_BOX = 256  # elements along an axis
MOST_KNOWN = 256  # addresses for which encoded maps of the same boxes are kept
SPANS = (16, 32, 64, 128)  # bytes of a swizzle; 16 is none
# type of a float32 array whose numbers a load rounds to 11 bits of mantissa, for products in tf32
ROUNDED = "tfloat32"
_TYPES = {
    "float64": "FLOAT64",
    "float32": "FLOAT32",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "int64": "INT64",
    "int32": "INT32",
    "uint8": "UINT8",
    ROUNDED: "TFLOAT32",
}
_SWIZZLES = {16: "NONE", 32: "32B", 64: "64B", 128: "128B"}


class Encoded(NamedTuple):
    """A tensor map on the host: its bytes, which live as long as this object, and their address."""

    memory: ctypes.Array[ctypes.c_char]
    address: int


@dataclass(frozen=True)
class Boxes:
    """Boxes of arrays of one dtype, shape and strides. Raises ValueError if they can't be encoded."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    span: int

    def __post_init__(self) -> None:
        if reason := self._refused():
            raise ValueError(f"tensor map of {self.dtype} {self.shape}: {reason}")

    @property
    def nbytes(self) -> int:
        """Return the bytes of a box, which an mbarrier expects from each load."""
        return prod(self.box) * itemsize(self.element)

    @property
    def element(self) -> str:
        """Return the dtype of the array."""
        return "float32" if self.dtype == ROUNDED else self.dtype

    def encoded(self, address: int) -> Encoded:
        """Return the map of the array at this address. Raises ValueError if the address is not a multiple of 16."""
        if address % ADDRESS_MULTIPLE or not address:
            raise ValueError(
                f"tensor map of {self.dtype} {self.shape}: address is {address:#x}, expected a multiple of 16"
            )
        if (known := self._known.get(address)) is not None:
            return known
        prototype, lock = self._prototype
        with lock:
            driver.done(driver.cu.cuTensorMapReplaceAddress(prototype, address), "tensor map")
            memory = ctypes.create_string_buffer(ctypes.string_at(prototype.getPtr(), NBYTES), NBYTES)
        made = Encoded(memory, ctypes.addressof(memory))
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[address] = made
        return made

    def simulated(self, array: np.ndarray) -> TensorMap:
        """Return the map of a NumPy array of this dtype, shape and strides; a kernel gets its `address`."""
        given = array.dtype, array.shape, array.strides
        strides = tuple(stride * array.itemsize for stride in self.strides)
        if given != (numpy_dtype(self.element), self.shape, strides):
            raise ValueError(f"tensor map of {self.dtype} {self.shape}, strides {strides}: the array is {given}")
        return TensorMap(array, self.box[::-1], self.span, rounds=self.dtype == ROUNDED)

    @cached_property
    def _known(self) -> dict[int, Encoded]:
        """Return the encoded maps by address."""
        return {}

    @cached_property
    def _prototype(self) -> tuple[Any, Lock]:
        """Return an encoded map and its lock. Replacing its address takes a tenth of the time of a new encoding."""
        return driver.done(driver.cu.cuTensorMapEncodeTiled(*self._arguments()), "tensor map"), Lock()

    def _arguments(self) -> tuple[Any, ...]:
        """Return the arguments of cuTensorMapEncodeTiled for an array at some address."""
        cu = driver.cu
        axes = range(len(self.shape) - 1, -1, -1)
        nbytes = itemsize(self.element)
        strides = [cu.cuuint64_t(max(self._stride(axis) * nbytes, ADDRESS_MULTIPLE)) for axis in [*axes][1:]]
        return (
            getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[self.dtype]}"),
            len(self.shape),
            ADDRESS_MULTIPLE,
            [cu.cuuint64_t(self.shape[axis]) for axis in axes],
            strides,
            [cu.cuuint32_t(self.box[axis]) for axis in axes],
            [cu.cuuint32_t(1) for _ in axes],
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[self.span]}"),
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def _stride(self, axis: int) -> int:
        """Return the stride of an axis in elements. That of an axis of size 1 is not used."""
        return self.strides[axis] if self.shape[axis] > 1 else 0

    def _refused(self) -> str:
        """Return why the boxes can't be encoded, "" if they can."""
        rank = len(self.shape)
        if self.dtype not in _TYPES:
            return f"expected a dtype of {', '.join(_TYPES)}"
        if not 2 <= rank <= 5 or not rank == len(self.strides) == len(self.box):
            return f"strides {self.strides}, box {self.box}, expected 2 to 5 axes and as many of each"
        nbytes = itemsize(self.element)
        for axis, (size, box) in enumerate(zip(self.shape, self.box, strict=True)):
            stride = self._stride(axis)
            if not 0 < size <= 2**32:
                return f"axis {axis} has {size} elements, expected 1 to 2**32"
            if not 0 < box <= MOST_BOX:
                return f"boxes have {box} elements along axis {axis}, expected 1 to {MOST_BOX}"
            if axis == rank - 1:
                if size > 1 and stride != 1:
                    return f"stride {stride} along the last axis, expected 1"
            elif size > 1 and (stride <= 0 or stride * nbytes % ADDRESS_MULTIPLE or stride * nbytes >= 2**40):
                size = f"{stride * nbytes} bytes along axis {axis}"
                return f"a stride of {size}, expected a multiple of {ADDRESS_MULTIPLE} from {ADDRESS_MULTIPLE} to 2**40"
        if self.span not in SPANS:
            return f"span is {self.span}, expected one of {', '.join(map(str, SPANS))} bytes"
        inner = self.box[-1] * nbytes
        if inner % 16:
            return f"boxes have {inner} bytes along the last axis, expected a multiple of 16"
        # a narrower box can be encoded too, but the layout of its lines is not documented
        if self.span > 16 and inner != self.span:
            return f"boxes have {inner} bytes along the last axis, expected the {self.span} of the swizzle"
        return ""


@lru_cache(4096)
def boxes_of(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], span: int = 128
) -> Boxes:
    """Return the same `Boxes` for the same arguments, so that a shape is validated and encoded once."""
    return Boxes(dtype, shape, strides, box, span)


class Mapped(NamedTuple):
    """The boxes of an array that a kernel loads or stores, see `Boxes`."""

    array: str  # its name in the call
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    span: int = 128

    @property
    def boxes(self) -> Boxes:
        return boxes_of(self.dtype, self.shape, self.strides, self.box, self.span)


class Maps:
    """The tensor maps of one plan's launches."""

    def __init__(self, wanted: Sequence[Mapped], names: Sequence[str | None]):
        """names: of the call's arrays, in the order of their addresses."""
        self.wanted = [(each.boxes, names.index(each.array)) for each in wanted]

    def encoded(self, addresses: Sequence[int]) -> list[Encoded]:
        """Return the maps of arrays at these addresses. The caller keeps them until the launch is done."""
        return [boxes.encoded(addresses[which]) for boxes, which in self.wanted]

    def simulated(self, arrays: Sequence[Any]) -> list[Any]:
        """Return records of the maps, for the simulator. Their `address` is valid as long as the caller keeps them."""
        return [boxes.simulated(_view(arrays[which], boxes)) for boxes, which in self.wanted]


def _view(array: np.ndarray, boxes: Boxes) -> np.ndarray:
    """Return an array's memory with the shape and strides of its map."""
    strides = [stride * array.itemsize for stride in boxes.strides]
    return np.lib.stride_tricks.as_strided(array, boxes.shape, strides)
