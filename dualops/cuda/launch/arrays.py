"""One adapter per array library: metadata, address, allocation, current stream.

The type of the first array seen selects the adapter, through sys.modules: dualops imports no array library that the
caller has not imported. Adapters exist for torch tensors, Numba and CuPy device arrays, and any other array with
`__cuda_array_interface__`; in the simulator for NumPy arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from ...spec import ArrayMeta
from ...spec.meta import check_plain, contiguous_strides, extent, in_elements, itemsize, numpy_dtype
from ..compiler.backend import SIMULATED, cuda
from .driver import current_device, device_of_address, is_capturing

NUMBERS = (int, float)  # types of host numbers that a launch accepts
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


Allocator = Callable[[tuple[int, ...], tuple[int, ...]], Any]  # (shape, strides in elements) -> a new array


class Adapter(Protocol):
    """The operations of an array library that dualops needs."""

    def layouts(self, arrays: Sequence[Any]) -> tuple[tuple[Hashable, ...], list[Any]]:
        """Return the layouts, which a plan depends on, and the addresses.

        The layout of an array is a tuple that begins with shape and strides (in elements), and has dtype, device and
        alignment. The layout of None is None, with address 0. The layout of a host number is its type; its value is
        the address.
        """
        ...

    def meta(self, array: Any) -> ArrayMeta: ...

    def meta_of(self, layout: Any) -> ArrayMeta:
        """Return the meta of an array with that layout. Its address is the alignment."""
        ...

    def pointer(self, array: Any) -> int: ...

    def allocator(self, dtype: str, device: str) -> Allocator:
        """Return a function that makes new arrays, of undefined values, on that device, which must be current then."""
        ...

    def stream(self, arrays: Sequence[Any], op: str = "dualops.cuda") -> int:
        """Return the handle of the stream for work on these arrays. Raises ValueError if they name several streams."""
        ...

    def used_on(self, array: Any, handle: int, home: int | None = None) -> None:
        """Record that this stream reads or writes the array: its memory may not be reused before that is done.

        home: the stream that was current when it was allocated, if that is not the current one.
        """
        ...

    def pointers(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        """Return the addresses of many arrays, quickly."""
        ...

    def shapes(self, arrays: Sequence[Any]) -> tuple[Iterable[Any], ...]:
        """Return shapes, strides and dtypes of many arrays, lazily. If they and addresses are equal, so are metas.

        Arrays for which `meta` fails, such as lazily negated views, are exceptions: they are refused when first seen.
        It yields one at a time: thousands of live tuples would start Python's garbage collector.
        """
        ...

    def origins(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        """Return the distinct devices and lazy-negation flags of many arrays, which are part of `layouts`, too."""
        ...

    def current_device(self) -> int:
        """Return the GPU that is current in this thread, if any."""
        ...

    def is_capturing(self, handle: int) -> bool:
        """Whether the library's current stream of the current GPU, this one, is being captured."""
        ...


class TorchAdapter:
    """torch tensors; allocation and the current stream are torch's."""

    def __init__(self, torch: Any):
        self.torch = torch
        names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
        self.names = {getattr(torch, name): name for name in names}
        self.dtypes = {name: dtype for dtype, name in self.names.items()}
        self.device_names: dict[Any, str] = {}
        # these return what torch.cuda.current_stream and current_device do, several microseconds faster
        raw, current = getattr(torch._C, "_cuda_getCurrentRawStream", None), getattr(torch._C, "_cuda_getDevice", None)
        self.raw_stream = raw or (lambda index: torch.cuda.current_stream(index).cuda_stream)
        self.current_device = current or torch.cuda.current_device
        self.pointer = torch.Tensor.data_ptr

    def layouts(self, arrays: Sequence[Any]) -> tuple[tuple[Hashable, ...], list[Any]]:
        found: list[Hashable] = []
        pointers: list[Any] = []
        for a in arrays:
            if a is None:
                found.append(None)
                pointers.append(0)
            elif type(a) in NUMBERS:
                found.append(type(a))
                pointers.append(a)
            else:
                pointer = a.data_ptr()
                found.append((a.shape, a.stride(), a.dtype, a.get_device(), a.is_neg(), pointer & 15))
                pointers.append(pointer)
        return tuple(found), pointers

    def meta(self, array: Any) -> ArrayMeta:
        if array.layout is not self.torch.strided or array.is_neg() or array.is_nested:
            layout = f"{array.layout}, negated: resolve_neg() it" if array.is_neg() else array.layout
            layout = "a nested one" if array.is_nested else layout
            raise TypeError(f"expected a strided tensor that is not lazily negated, got {layout}")
        dtype = self.names.get(array.dtype, str(array.dtype).removeprefix("torch."))
        device = array.device
        name = self.device_names.get(device)
        if name is None:
            name = self.device_names[device] = str(device)
        return ArrayMeta(tuple(array.shape), dtype, array.stride(), name, array.data_ptr())

    def meta_of(self, layout: Any) -> ArrayMeta:
        shape, strides, dtype, index, _, alignment = layout
        return ArrayMeta(tuple(shape), self.names[dtype], strides, f"cuda:{index}", alignment)

    def pointers(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        return tuple(map(self.torch.Tensor.data_ptr, arrays))

    def shapes(self, arrays: Sequence[Any]) -> tuple[Iterable[Any], ...]:
        return map(_SHAPE, arrays), map(self.torch.Tensor.stride, arrays), map(_DTYPE, arrays)

    def origins(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        tensor = self.torch.Tensor
        return frozenset(map(tensor.get_device, arrays)), frozenset(map(tensor.is_neg, arrays))

    def allocator(self, dtype: str, device: str) -> Allocator:
        kind = self.dtypes[dtype]
        allocate = partial(self.torch.empty_strided, dtype=kind, device=self.torch.device(device))
        guards = getattr(getattr(self.torch._C, "_dynamo", None), "guards", None)
        fast = getattr(guards, "_empty_strided_cuda", None)  # compiled functions call it, too: it takes half the time
        if fast is None:
            return allocate
        deterministic = self.torch._C._get_deterministic_algorithms  # if it is on, torch fills new tensors

        def allocate_quickly(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            return allocate(shape, strides) if deterministic() else fast(shape, strides, kind)

        return allocate_quickly

    def stream(self, arrays: Sequence[Any], op: str = "dualops.cuda") -> int:
        return self.raw_stream(arrays[0].get_device())

    def is_capturing(self, handle: int) -> bool:
        return self.torch.cuda.is_current_stream_capturing()

    def used_on(self, array: Any, handle: int, home: int | None = None) -> None:
        if handle != (self.stream((array,)) if home is None else home):
            array.record_stream(self.torch.cuda.ExternalStream(handle, device=array.device))


def _seen(face: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of an array's metadata without its address: shape, strides, dtype, whether it is read-only."""
    return face["shape"], face.get("strides"), face["typestr"], face["data"][1]


def _address(face: Mapping[str, Any]) -> int:
    """Return the address of the first element; 0 if there is none. Raises ValueError for an impossible address."""
    if 0 in face["shape"]:
        return 0
    address, size = face["data"][0], np.dtype(face["typestr"]).itemsize
    if not address or address % size:
        raise ValueError(f"address {address:#x} is no place of an element, expected a multiple of its {size} bytes")
    return address


# dtype names of a `__cuda_array_interface__`; torch and ml_dtypes show bfloat16 as two bytes without a meaning
_TYPESTR = {"<f8": "float64", "<f4": "float32", "<f2": "float16", "<V2": "bfloat16"}


class InterfaceAdapter:
    """Anything with `__cuda_array_interface__`: Numba device arrays, CuPy arrays and others."""

    current_device, is_capturing = staticmethod(current_device), staticmethod(is_capturing)

    def layouts(self, arrays: Sequence[Any]) -> tuple[tuple[Hashable, ...], list[Any]]:
        parts = [
            (None, 0) if array is None else (type(array), array) if type(array) in NUMBERS else self._layout(array)
            for array in arrays
        ]
        return tuple([layout for layout, _ in parts]), [pointer for _, pointer in parts]

    @staticmethod
    def _layout(array: Any) -> tuple[tuple[Any, ...], int]:
        face = array.__cuda_array_interface__
        if face.get("mask") is not None:
            raise TypeError("it is a masked array, expected one without a mask")
        shape, strides, typestr = tuple(face["shape"]), face.get("strides"), face["typestr"]
        steps = contiguous_strides(shape) if strides is None else in_elements(strides, np.dtype(typestr).itemsize)
        address, read_only = _address(face), face["data"][1]
        device = device_of_address(address)
        return (shape, steps, typestr, device, type(array), read_only, address & 15), address

    def meta(self, array: Any) -> ArrayMeta:
        layout, address = self._layout(array)
        return self.meta_of(layout)._replace(pointer=address)

    def meta_of(self, layout: Any) -> ArrayMeta:
        shape, strides, typestr, index, _, read_only, alignment = layout
        named = np.dtype(typestr)
        dtype = _TYPESTR.get(typestr) or (named.name if named.isnative else typestr)  # ">f4" is no dtype of ours
        return ArrayMeta(shape, dtype, strides, f"cuda:{index}", alignment, read_only)

    def pointer(self, array: Any) -> int:
        return _address(array.__cuda_array_interface__)

    def allocator(self, dtype: str, device: str) -> Allocator:
        if dtype == "bfloat16":
            raise TypeError("Numba has no bfloat16 arrays to put the result in: give out=")
        size, stored = itemsize(dtype), numpy_dtype(dtype)
        return lambda shape, strides: cuda.device_array(shape, stored, strides=tuple(step * size for step in strides))

    def stream(self, arrays: Sequence[Any], op: str = "dualops.cuda") -> int:
        """Return the stream that the arrays name; CUDA's default stream if none does (version 2 of the interface)."""
        faces = (array.__cuda_array_interface__ for array in arrays if array is not None and type(array) not in NUMBERS)
        said = {stream for face in faces if (stream := face.get("stream"))}
        if len(said) > 1:
            streams = ", ".join(map(str, sorted(said)))
            raise ValueError(f"{op}: arrays are of streams {streams}, expected one, or a call with stream=")
        return next(iter(said), 0)

    def used_on(self, array: Any, handle: int, home: int | None = None) -> None:
        pass  # Numba frees memory only after the device has finished all work

    def pointers(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        return tuple(map(self.pointer, arrays))

    def shapes(self, arrays: Sequence[Any]) -> tuple[Iterable[Any], ...]:
        return ((_seen(array.__cuda_array_interface__) for array in arrays),)

    def origins(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        return frozenset(map(device_of_address, pointers))


class CupyAdapter(InterfaceAdapter):
    """CuPy arrays; allocation and the current stream are CuPy's."""

    def __init__(self, cupy: Any):
        self.cupy = cupy

    def allocator(self, dtype: str, device: str) -> Allocator:
        size, stored = itemsize(dtype), numpy_dtype(dtype)

        def allocate(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            memory = self.cupy.cuda.alloc(max(extent(shape, strides), 1) * size)
            return self.cupy.ndarray(shape, stored, memory, tuple(step * size for step in strides))

        return allocate

    def stream(self, arrays: Sequence[Any], op: str = "dualops.cuda") -> int:
        return self.cupy.cuda.get_current_stream().ptr

    def used_on(self, array: Any, handle: int, home: int | None = None) -> None:
        owner = self.stream((array,)) if home is None else home
        if handle != owner:  # its pool reuses memory at once, in the order of the stream on which it was allocated
            done = self.cupy.cuda.ExternalStream(handle).record()
            self.cupy.cuda.ExternalStream(owner).wait_event(done)


class NumpyAdapter(InterfaceAdapter):
    """NumPy arrays, in the simulator. New arrays have all bits set, so that unwritten elements show as NaN."""

    @staticmethod
    def _layout(array: Any) -> tuple[tuple[Any, ...], int]:
        meta = ArrayMeta.of_numpy(array)
        layout = meta.shape, meta.strides, meta.dtype, type(array), meta.read_only, int(meta.pointer) & 15
        return layout, int(meta.pointer)

    def meta(self, array: Any) -> ArrayMeta:
        return ArrayMeta.of_numpy(array)

    def meta_of(self, layout: Any) -> ArrayMeta:
        shape, strides, dtype, _, read_only, alignment = layout
        return ArrayMeta(shape, dtype, strides, "cpu", alignment, read_only)

    def pointer(self, array: Any) -> int:
        return array.ctypes.data

    def allocator(self, dtype: str, device: str) -> Allocator:
        size, stored = itemsize(dtype), numpy_dtype(dtype)

        def allocate(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            memory = np.full(max(extent(shape, strides), 1) * size + 16, 0xFF, np.uint8)
            return np.ndarray(shape, stored, memory, -memory.ctypes.data % 16, tuple(step * size for step in strides))

        return allocate

    def stream(self, arrays: Sequence[Any], op: str = "dualops.cuda") -> int:
        return 0

    def current_device(self) -> int:
        return 0

    def is_capturing(self, handle: int) -> bool:
        return False

    def shapes(self, arrays: Sequence[Any]) -> tuple[Iterable[Any], ...]:
        return (((type(a), a.shape, a.strides, a.dtype, a.flags.writeable) for a in arrays),)

    def origins(self, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
        return ()


ADAPTERS: dict[type, Adapter] = {}
_INTERFACE = InterfaceAdapter()


def adapter_of(array: Any, op: str, name: str) -> Adapter:
    """Return the adapter for this array. Raises TypeError, naming operator and argument, for an unsupported type."""
    kind = type(array)
    found = ADAPTERS.get(kind)
    if found is None:
        found = _find(array, op, name)
        if found is not _INTERFACE or hasattr(kind, "__cuda_array_interface__"):  # else other instances may lack it
            ADAPTERS[kind] = found
    return found


def _find(array: Any, op: str, name: str) -> Adapter:
    if SIMULATED:
        if isinstance(array, np.ndarray):
            check_plain(array, op, name)
            return NumpyAdapter()
        raise TypeError(f"{op}: {name} is a {_class_of(array)}, expected a NumPy array: kernels run in the simulator")
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(array, torch.Tensor):
        return TorchAdapter(torch)
    if cupy is not None and isinstance(array, cupy.ndarray):
        return CupyAdapter(cupy)
    if isinstance(array, np.ndarray):
        raise TypeError(f"{op}: {name} is a NumPy array on the host, expected an array on a GPU")
    if hasattr(array, "__cuda_array_interface__"):
        return _INTERFACE
    raise TypeError(f"{op}: {name} is a {_class_of(array)}, expected an array with __cuda_array_interface__")


def _class_of(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"


def cdiv(value: int, step: int) -> int:
    """Return the number of steps that cover `value`, rounded up."""
    return -(-value // step)


def align_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not less than `value`."""
    return -(-value // step) * step


def collapse(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the fewest axes of arrays of one shape: neighbours that are one axis in all arrays are merged.

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
