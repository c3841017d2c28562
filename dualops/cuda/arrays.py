"""One adapter per array library: metadata, address, allocation, current stream.

An adapter is found by the type of the first array seen, through sys.modules: dualops imports no array library that the
caller has not. torch tensors, Numba and CuPy device arrays, and any other `__cuda_array_interface__`; in the simulator
NumPy arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from ..spec import ArrayMeta
from ..spec.meta import check_plain, contiguous_strides, in_elements, itemsize, numpy_dtype
from .backend import SIMULATED, cuda

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


class Adapter(Protocol):
    """What dualops asks of an array library."""

    def layouts(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        """What a plan depends on: of each array shape, strides, dtype, device and alignment."""
        ...

    def meta(self, array: Any) -> ArrayMeta: ...

    def pointer(self, array: Any) -> int: ...

    def allocator(self, meta: ArrayMeta) -> Callable[[], Any]:
        """What makes a new array like `meta` on `meta.device`, its values undefined."""
        ...

    def stream(self, array: Any) -> int:
        """Handle of the stream that work on this array goes to."""
        ...

    def used_on(self, array: Any, handle: int, home: int | None = None) -> None:
        """Its memory is read or written on this stream, and may not be given to anybody before that is done.

        home: the stream that was current when it was allocated, if that is not the current one.
        """
        ...

    def pointers(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        """The addresses of many arrays, quickly."""
        ...

    def shapes(self, arrays: Sequence[Any]) -> tuple[Iterable[Any], ...]:
        """Shapes, strides and dtypes of many arrays, quickly: where these and addresses are equal, `meta` is too.

        But for what makes `meta` fail, such as a lazily negated view, which is refused when it is first seen.
        One after the other: thousands of tuples that live at once would bring Python's garbage collector in.
        """
        ...

    def origins(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        """Devices and lazy negation, which `layouts` has too: of many arrays the different ones."""
        ...

    def on_device(self, index: int) -> AbstractContextManager[Any] | None:
        """What makes GPU `index` current, or None where it is."""
        ...


class TorchAdapter:
    """torch tensors; allocation and the current stream are torch's."""

    def __init__(self, torch: Any):
        self.torch = torch
        names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
        self.names = {getattr(torch, name): name for name in names}
        self.dtypes = {name: dtype for dtype, name in self.names.items()}
        self.device_names: dict[Any, str] = {}
        # what torch.cuda.current_stream and current_device end in, several microseconds sooner
        raw, current = getattr(torch._C, "_cuda_getCurrentRawStream", None), getattr(torch._C, "_cuda_getDevice", None)
        self.raw_stream = raw or (lambda index: torch.cuda.current_stream(index).cuda_stream)
        self.current_device = current or torch.cuda.current_device

    def layouts(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        return tuple(
            [(a.shape, a.stride(), a.dtype, a.get_device(), a.is_neg(), p & 15) for a, p in zip(arrays, pointers)]
        )

    def meta(self, array: Any) -> ArrayMeta:
        if array.layout is not self.torch.strided or array.is_neg():
            told = f"{array.layout}, negated: resolve_neg() it" if array.is_neg() else array.layout
            raise TypeError(f"expected a strided tensor that is not lazily negated, got {told}")
        dtype = self.names.get(array.dtype, str(array.dtype).removeprefix("torch."))
        device = array.device
        name = self.device_names.get(device)
        if name is None:
            name = self.device_names[device] = str(device)
        return ArrayMeta(tuple(array.shape), dtype, array.stride(), name, array.data_ptr())

    def pointer(self, array: Any) -> int:
        return array.data_ptr()

    def pointers(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        return tuple(map(self.torch.Tensor.data_ptr, arrays))

    def shapes(self, arrays: Sequence[Any]) -> tuple[Iterable[Any], ...]:
        return map(_SHAPE, arrays), map(self.torch.Tensor.stride, arrays), map(_DTYPE, arrays)

    def origins(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        tensor = self.torch.Tensor
        return frozenset(map(tensor.get_device, arrays)), frozenset(map(tensor.is_neg, arrays))

    def allocator(self, meta: ArrayMeta) -> Callable[[], Any]:
        device, dtype = self.torch.device(meta.device), self.dtypes[meta.dtype]
        return partial(self.torch.empty_strided, meta.shape, meta.strides, dtype=dtype, device=device)

    def on_device(self, index: int) -> AbstractContextManager[Any] | None:
        return None if self.current_device() == index else self.torch.cuda.device(index)

    def stream(self, array: Any) -> int:
        return self.raw_stream(array.get_device())

    def used_on(self, array: Any, handle: int, home: int | None = None) -> None:
        if handle != (self.stream(array) if home is None else home):
            array.record_stream(self.torch.cuda.ExternalStream(handle, device=array.device))


def _seen(face: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the metadata of an array follows from beside its address: shape, strides, dtype, if it is read-only."""
    return face["shape"], face.get("strides"), face["typestr"], face["data"][1]


# dtype names of a `__cuda_array_interface__`; torch and ml_dtypes show bfloat16 as two bytes without a meaning
_TYPESTR = {"<f8": "float64", "<f4": "float32", "<f2": "float16", "<V2": "bfloat16"}


class InterfaceAdapter:
    """Anything with `__cuda_array_interface__`: Numba device arrays, CuPy arrays and others."""

    def layouts(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        faces = [array.__cuda_array_interface__ for array in arrays]
        return tuple([(*_seen(face), _ordinal(pointer), pointer & 15) for face, pointer in zip(faces, pointers)])

    def meta(self, array: Any) -> ArrayMeta:
        interface = array.__cuda_array_interface__
        shape, (address, read_only) = tuple(interface["shape"]), interface["data"]
        dtype = _TYPESTR.get(interface["typestr"]) or np.dtype(interface["typestr"]).name
        size = np.dtype(interface["typestr"]).itemsize
        strides = interface.get("strides")
        elements = contiguous_strides(shape) if strides is None else in_elements(strides, size)
        return ArrayMeta(shape, dtype, elements, f"cuda:{_ordinal(address)}", address, read_only)

    def pointer(self, array: Any) -> int:
        return array.__cuda_array_interface__["data"][0]

    def allocator(self, meta: ArrayMeta) -> Callable[[], Any]:
        if meta.dtype == "bfloat16":
            raise TypeError("Numba has no bfloat16 arrays to put the result in: give out=")
        strides = tuple(stride * itemsize(meta.dtype) for stride in meta.strides)
        return partial(cuda.device_array, meta.shape, numpy_dtype(meta.dtype), strides=strides)

    def on_device(self, index: int) -> AbstractContextManager[Any] | None:
        return None if cuda.get_current_device().id == index else cuda.gpus[index]

    def stream(self, array: Any) -> int:
        return array.__cuda_array_interface__.get("stream") or 0

    def used_on(self, array: Any, handle: int, home: int | None = None) -> None:
        pass  # Numba's memory is freed when the device is done with everything

    def pointers(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        return tuple(map(self.pointer, arrays))

    def shapes(self, arrays: Sequence[Any]) -> tuple[Iterable[Any], ...]:
        return ((_seen(array.__cuda_array_interface__) for array in arrays),)

    def origins(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        return frozenset(map(_ordinal, pointers))


class CupyAdapter(InterfaceAdapter):
    """CuPy arrays; allocation and the current stream are CuPy's."""

    def __init__(self, cupy: Any):
        self.cupy = cupy

    def allocator(self, meta: ArrayMeta) -> Callable[[], Any]:
        size = itemsize(meta.dtype)
        strides = tuple(stride * size for stride in meta.strides)

        def allocate() -> Any:
            memory = self.cupy.cuda.alloc(max(meta.extent, 1) * size)
            return self.cupy.ndarray(meta.shape, numpy_dtype(meta.dtype), memory, strides)

        return allocate

    def on_device(self, index: int) -> AbstractContextManager[Any] | None:
        return None if self.cupy.cuda.Device().id == index else self.cupy.cuda.Device(index)

    def stream(self, array: Any) -> int:
        return self.cupy.cuda.get_current_stream().ptr

    def used_on(self, array: Any, handle: int, home: int | None = None) -> None:
        owner = self.stream(array) if home is None else home
        if handle != owner:  # its pool hands memory on at once, in the order of the stream that it was made on
            done = self.cupy.cuda.ExternalStream(handle).record()
            self.cupy.cuda.ExternalStream(owner).wait_event(done)


class NumpyAdapter:
    """NumPy arrays, in the simulator. Results are born with all bits set, so that what is not written shows as NaN."""

    def layouts(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        return tuple([(*shape, pointer & 15) for shape, pointer in zip(*self.shapes(arrays), pointers)])

    def meta(self, array: Any) -> ArrayMeta:
        return ArrayMeta.of_numpy(array)

    def pointer(self, array: Any) -> int:
        return array.ctypes.data

    def allocator(self, meta: ArrayMeta) -> Callable[[], Any]:
        size = itemsize(meta.dtype)
        strides = tuple(stride * size for stride in meta.strides)

        def allocate() -> Any:
            memory = np.full(max(meta.extent, 1) * size + 16, 0xFF, np.uint8)
            return np.ndarray(meta.shape, numpy_dtype(meta.dtype), memory, -memory.ctypes.data % 16, strides)

        return allocate

    def on_device(self, index: int) -> AbstractContextManager[Any] | None:
        return None

    def stream(self, array: Any) -> int:
        return 0

    def used_on(self, array: Any, handle: int, home: int | None = None) -> None:
        pass

    def pointers(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        return tuple(map(self.pointer, arrays))

    def shapes(self, arrays: Sequence[Any]) -> tuple[Iterable[Any], ...]:
        return (((type(a), a.shape, a.strides, a.dtype, a.flags.writeable) for a in arrays),)

    def origins(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        return ()


ADAPTERS: dict[type, Adapter] = {}


def adapter_of(array: Any, op: str, name: str) -> Adapter:
    """The adapter for arrays of this type. Raises TypeError, naming operator and argument, for what can't be taken."""
    found = ADAPTERS.get(type(array))
    if found is None:
        found = ADAPTERS[type(array)] = _find(array, op, name)
    return found


def _find(array: Any, op: str, name: str) -> Adapter:
    if SIMULATED:
        if isinstance(array, np.ndarray):
            check_plain(array, op, name)
            return NumpyAdapter()
        raise TypeError(f"{op}: {name} is a {_told(array)}, expected a NumPy array: kernels run in the simulator")
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(array, torch.Tensor):
        return TorchAdapter(torch)
    if cupy is not None and isinstance(array, cupy.ndarray):
        return CupyAdapter(cupy)
    if isinstance(array, np.ndarray):
        raise TypeError(f"{op}: {name} is a NumPy array on the host, expected an array on a GPU")
    if hasattr(type(array), "__cuda_array_interface__"):
        return InterfaceAdapter()
    raise TypeError(f"{op}: {name} is a {_told(array)}, expected an array with __cuda_array_interface__")


def _told(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"


def _ordinal(address: int) -> int:
    """Number of the GPU that an address belongs to."""
    from cuda.bindings import driver

    if address == 0:
        return 0
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, ordinal = driver.cuPointerGetAttribute(attribute, address)
    return int(ordinal) if error == driver.CUresult.CUDA_SUCCESS else 0


def cdiv(value: int, step: int) -> int:
    """How many steps cover `value`."""
    return -(-value // step)


def align_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not less than `value`."""
    return -(-value // step) * step


def collapse(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The fewest axes by which arrays of one shape can be walked: neighbours that all arrays lay out as one are merged.

    Axes of size 1 vanish. Returns the merged shape and, for each array, its strides along it.
    """
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(kept[-1] == given[axis] * size for kept, given in zip(steps, strides, strict=True)):
            sizes[-1] *= size
            for kept, given in zip(steps, strides, strict=True):
                kept[-1] = given[axis]
        else:
            sizes.append(size)
            for kept, given in zip(steps, strides, strict=True):
                kept.append(given[axis])
    return tuple(sizes), [tuple(kept) for kept in steps]
