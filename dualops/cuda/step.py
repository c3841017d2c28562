"""One launch: a kernel with its grid and arguments, made ready to run again and again with other pointers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..spec import ArrayMeta
from . import simulator
from .backend import SIMULATED, Kernel, f32, f64, i32, types
from .compile import binary
from .device import Device

Argument = str | int | float | tuple[Any, ...]


class Step(NamedTuple):
    """One launch. An argument that is a string is the array of that name, or a null pointer if there is none.

    Arguments may be tuples of arguments, named or not: the kernel gets them so. An integer parameter that is given an
    array gets its address.
    """

    kernel: Kernel
    grid: tuple[int, ...]  # blocks
    args: tuple[Argument, ...]
    shared_bytes: int = 0
    resident: bool = False  # no more blocks than run at once: the kernel's blocks take one piece of work after another


def prepare(step: Step, names: Sequence[str], device: Device) -> Callable[..., None]:
    """A function that launches `step`, given the pointers (or, simulated, the arrays) of `names` in order."""
    flattened = list(leaves(step.args))
    places = [(i, names.index(arg)) for i, arg in enumerate(flattened) if isinstance(arg, str) and arg in names]
    fixed = [0 if isinstance(arg, str) else arg for arg in flattened]
    if SIMULATED:
        return _simulated(step, names, places, fixed)
    from cuda.core import LaunchConfig, launch

    function, casts = load(step.kernel, device.arch, step.shared_bytes)
    narrow = [(place, which, casts[place]) for place, which in places if casts[place] is not int]
    template = [cast(value) for cast, value in zip(casts, fixed, strict=True)]
    cluster, (blocks, *rest) = step.kernel.cluster, step.grid
    options = {"block": step.kernel.threads, "shmem_size": step.shared_bytes}
    if cluster > 1:
        options["cluster"] = cluster
    if step.resident:
        blocks = min(blocks, _resident_blocks(function, step, options))
    config = LaunchConfig(grid=(blocks // cluster, *rest), **options)

    def run(pointers: Sequence[int], handle: int) -> None:
        args = template.copy()
        for place, which in places:
            args[place] = pointers[which]
        for place, which, cast in narrow:
            args[place] = cast(pointers[which])
        launch(_stream(handle), config, function, *args)

    return run


def _resident_blocks(function: Any, step: Step, options: dict[str, Any]) -> int:
    """Blocks of a kernel that the GPU runs at once."""
    from cuda.core import Device as CoreDevice, LaunchConfig

    here, cluster = CoreDevice(), step.kernel.cluster
    if cluster > 1:
        config = LaunchConfig(grid=1, **options)
        return function.occupancy.max_active_clusters(config, stream=here.default_stream) * cluster
    each = function.occupancy.max_active_blocks_per_multiprocessor(step.kernel.threads, step.shared_bytes)
    return each * here.properties.multiprocessor_count


def leaves(args: Any) -> Iterator[Any]:
    """The arguments inside nested tuples, in order; of types as well as of values."""
    for arg in args:
        if isinstance(arg, (tuple, types.BaseTuple)):
            yield from leaves(arg)
        else:
            yield arg


def nested(like: Any, values: Iterator[Any]) -> Any:
    """`values` in the nested tuples of `like`."""
    if not isinstance(like, tuple):
        return next(values)
    inner = [nested(part, values) for part in like]
    return type(like)(*inner) if hasattr(like, "_fields") else tuple(inner)


def _simulated(
    step: Step, names: Sequence[str], places: list[tuple[int, int]], fixed: list[Any]
) -> Callable[[Sequence[Any]], None]:
    # Python ints and typed floats reach the simulator as they would reach the compiled kernel
    typed = {f32: np.float32, f64: np.float64}
    kinds = list(leaves(step.kernel.argtypes))
    scalars = [typed[kind](v) if kind in typed else v for v, kind in zip(fixed, kinds, strict=True)]

    grid = step.grid
    if step.resident:  # one cluster, which has to take every piece of work
        grid = (step.kernel.cluster, *grid[1:])

    def argument(value: Any, kind: Any, name: str) -> Any:
        if isinstance(value, np.ndarray):
            return value.ctypes.data if isinstance(kind, types.Integer) else flat(value, name)
        return typed[kind](value) if kind in typed else value

    def run(arrays: Sequence[Any]) -> None:
        args = list(scalars)
        for place, which in places:
            args[place] = argument(arrays[which], kinds[place], names[which])
        there = {array.ctypes.data: flat(array, name) for array, name in zip(arrays, names) if _has_place(array)}
        with simulator.reachable(there):
            simulator.launch(
                step.kernel.function,
                grid,
                (step.kernel.threads,),
                nested(step.args, iter(args)),
                cluster=step.kernel.cluster,
                shared_bytes=step.shared_bytes,
            )

    return run


def _has_place(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.size > 0


def flat(array: np.ndarray, name: str) -> simulator.Pointer:
    """The memory of a NumPy array from its first element to its last, as a kernel's pointer."""
    words = array.view({1: np.uint8, 2: np.uint16}.get(array.dtype.itemsize, array.dtype))
    extent = ArrayMeta.of_numpy(array).extent
    return simulator.Pointer(np.lib.stride_tricks.as_strided(words, (extent,), (words.itemsize,)), name)


def _cast(kind: Any) -> Callable[[Any], Any]:
    """What makes a scalar one that cuda.core passes as `kind`; a Python int is 64 bits wide there, and a pointer."""
    return {f32: np.float32, f64: np.float64, i32: np.int32}.get(kind, int)


@cache
def load(kernel: Kernel, arch: str, shared_bytes: int) -> tuple[Any, list[Callable[[Any], Any]]]:
    """The kernel on the GPU, as cuda.core has it, and what casts its arguments."""
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    made = binary(kernel, arch, shared_bytes)
    function = ObjectCode.from_cubin(made.cubin).get_kernel(made.entry)
    if shared_bytes > 48 * 1024 or made.report.static_shared + shared_bytes > 48 * 1024:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = driver.CUkernel(int(function.handle))
        for index in range(driver.cuDeviceGetCount()[1]):
            (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, handle, index)
            if error != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{kernel.identity}: {shared_bytes} bytes of shared memory were refused: {error}")
    return function, [_cast(kind) for kind in leaves(kernel.argtypes)]


@cache
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


def is_capturing(handle: int) -> bool:
    """Whether what is launched on a stream goes into a CUDA graph."""
    from cuda.bindings import driver

    _, status = driver.cuStreamIsCapturing(handle)  # an error says that another stream's capture forbids the question
    return status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE


def copy(target: Any, source: Any, nbytes: int, handle: int) -> None:
    """Copy memory of a GPU, given by addresses, in the order of a stream (simulated, from array to array)."""
    if SIMULATED:
        target[...] = source
        return
    from cuda.bindings import driver

    (error,) = driver.cuMemcpyDtoDAsync(target, source, nbytes, handle)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{nbytes} bytes were not copied from {source:#x} to {target:#x}: {error}")


class Mark:
    """A place in a stream's work."""

    def __init__(self, handle: int):
        from cuda.bindings import driver

        self.driver, self.over = driver, False
        _, self.event = driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        driver.cuEventRecord(self.event, handle)

    def is_over(self) -> bool:
        """Whether what was launched before it is done. Does not wait, nor disturb a stream that is being captured."""
        if not self.over:
            driver = self.driver
            relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
            (answer,) = driver.cuEventQuery(self.event)
            driver.cuThreadExchangeStreamCaptureMode(before)
            self.over = answer == driver.CUresult.CUDA_SUCCESS
        return self.over

    def hold_up(self, handle: int) -> None:
        """Let what is launched on a stream from now on wait for it."""
        self.driver.cuStreamWaitEvent(handle, self.event, 0)

    def __del__(self) -> None:
        self.driver.cuEventDestroy(self.event)


def handle_of(stream: Any) -> int:
    """The CUstream of an integer, or of a stream object of torch, CuPy, Numba or cuda.core."""
    if isinstance(stream, int):
        return stream
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if hasattr(stream, "handle"):
        handle = stream.handle
        return int(getattr(handle, "value", handle) or 0)
    raise TypeError(f"stream is a {type(stream).__qualname__}, expected an integer or a stream object")
