"""One launch: a kernel with its grid and arguments, prepared to run repeatedly with other pointers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, c_uint64
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ...spec import ArrayMeta
from .. import simulator
from ..compiler.backend import SIMULATED, Kernel, TensorMapType, f32, f64, types
from ..compiler.binaries import binary
from . import driver
from .device import PORTABLE_CLUSTER, Device
from .sizes import concrete

Argument = str | int | float | tuple[Any, ...]


class Step(NamedTuple):
    """One launch. A string argument is the array of that name, or a null pointer if the array is absent.

    Arguments may be tuples of arguments, named or not, which the kernel gets as tuples. An array as the argument of an
    integer parameter is passed as its address. For a parameter that is a tensor map, the bytes at its address on the
    host are passed.
    """

    kernel: Kernel
    grid: tuple[int, ...]  # blocks
    args: tuple[Argument, ...]
    shared_bytes: int = 0
    resident: bool = False  # persistent: only as many blocks as run at once; each processes several work items
    overlaps: bool = False  # blocks may begin while the previous launch still runs, and wait for its results


def prepare(step: Step, names: Sequence[str | None], device: Device) -> Callable[..., None]:
    """Return a function of the pointers (in the simulator the arrays) of `names` and a stream, which launches `step`.

    None among the names is an array that no argument uses.
    """
    made = launcher(step, names, device)
    return made(*made.numbers())


def launcher(step: Step, names: Sequence[str | None], device: Device) -> Launcher | SimulatedLauncher:
    """Return a launcher for steps that differ only in their numbers."""
    return (SimulatedLauncher if SIMULATED else Launcher)(step, names, device)


class Launcher:
    """A step's kernel on the GPU. Called with a grid and arguments, it returns the function that launches it."""

    def __init__(self, step: Step, names: Sequence[str | None], device: Device):
        self.step = step
        self.shared_bytes, self.cluster = concrete(step.shared_bytes), step.kernel.cluster
        function, self.kinds = load(step.kernel, device.arch, self.shared_bytes)
        self.handle = driver.cu.CUfunction(int(function.handle))
        self.most_blocks = _resident_blocks(function, step, self.shared_bytes) if step.resident else None
        self._prepare(_places(step, names))

    def _prepare(self, places: Sequence[tuple[int, int]]) -> None:
        """Sort arguments by how they are written. places: of those that are arrays."""
        count = len(self.kinds)
        floats = {i: kind for i, kind in enumerate(self.kinds) if kind is f32 or kind is f64}
        # the driver reads a tensor map at the map's own address, which each launch writes instead of a word's address
        behind = [count * isinstance(kind, TensorMapType) for kind in self.kinds]
        self.single, self.runs = _runs([(i + behind[i], which) for i, which in places if i not in floats])
        self.floats = [*floats.items()]
        self.float_arrays = [(i, which, floats[i]) for i, which in places if i in floats]
        self.words = c_uint64 * (2 * count)

    def numbers(self) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the step's grid, and its arguments without their tuples; in a traced call some are sizes."""
        blocks, *rest = self.step.grid
        if self.most_blocks is not None:
            blocks = min(blocks, self.most_blocks)
        whole = blocks // self.cluster * self.cluster
        return (whole, *rest), [0 if isinstance(arg, str) else arg for arg in leaves(self.step.args)]

    def __call__(self, grid: tuple[int, ...], args: list[Any]) -> Callable[[Sequence[int], int], None]:
        """Return the function that launches with a grid and arguments.

        The driver reads each argument at its address: that of a tensor map, which the launch passes, or of 8 bytes in
        `words`. Each launch writes the words of the arguments, then their addresses.
        """
        count, numbers = len(args), [*args]
        for i, kind in self.floats:
            numbers[i] = _word(args[i], kind)
        words = self.words()
        begin = addressof(words)
        addresses = begin + 8 * count
        words[:] = [*map(int, numbers), *range(begin, addresses, 8)]
        single, runs, floats = self.single, self.runs, self.float_arrays
        launch, function, lock = driver.cu.cuLaunchKernelEx, self.handle, Lock()
        configs: dict[int, Any] = {}  # stream -> launch configuration

        def run(pointers: Sequence[int], handle: int) -> None:
            config = configs.get(handle)
            if config is None:
                config = configs[handle] = self._config(grid, handle)
            with lock:
                for i, which in single:
                    words[i] = pointers[which]
                for own, given in runs:
                    words[own] = pointers[given]
                for i, which, kind in floats:
                    words[i] = _word(pointers[which], kind)
                (error,) = launch(config, function, addresses, 0)
            if error:
                raise RuntimeError(f"{self.step.kernel.name}: the CUDA driver answered {error.name} to its launch")

        return run

    def _config(self, grid: tuple[int, ...], handle: int) -> Any:
        """Return the launch configuration: what the driver needs in addition to the kernel and its arguments."""
        cu = driver.cu
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = self.step.kernel.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, cu.CUstream(handle)
        attributes, kinds = [], cu.CUlaunchAttributeID
        if self.cluster > 1:
            attributes.append(cu.CUlaunchAttribute())
            attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attributes[-1].value.clusterDim.x = self.cluster
            attributes[-1].value.clusterDim.y = attributes[-1].value.clusterDim.z = 1
        if self.step.overlaps:
            attributes.append(cu.CUlaunchAttribute())
            attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        return config


class SimulatedLauncher:
    """A step's kernel in the simulator, where arrays replace their pointers."""

    def __init__(self, step: Step, names: Sequence[str | None], device: Device):
        self.step, self.names = step, names
        self.places = _places(step, names)
        self.kinds = [*leaves(step.kernel.argtypes)]

    def numbers(self) -> tuple[tuple[Any, ...], list[Any]]:
        blocks, *rest = self.step.grid
        if self.step.resident:  # one cluster, which must process all work items
            blocks = self.step.kernel.cluster
        return (blocks, *rest), [0 if isinstance(arg, str) else arg for arg in leaves(self.step.args)]

    def __call__(self, grid: tuple[int, ...], args: list[Any]) -> Callable[..., None]:
        step, names = self.step, self.names
        scalars = [_simulated(value, kind, "") for value, kind in zip(args, self.kinds, strict=True)]

        def run(arrays: Sequence[Any], handle: int = 0) -> None:
            own = scalars.copy()
            for i, which in self.places:
                own[i] = _simulated(arrays[which], self.kinds[i], names[which])
            there = {x.ctypes.data: flat(x, name) for x, name in zip(arrays, names) if name and _has_place(x)}
            with simulator.reachable(there):
                simulator.launch(
                    step.kernel.function,
                    grid,
                    (step.kernel.threads,),
                    nested(step.args, iter(own)),
                    cluster=step.kernel.cluster,
                    shared_bytes=concrete(step.shared_bytes),
                    overlaps=step.overlaps,
                )

        return run


def _places(step: Step, names: Sequence[str | None]) -> list[tuple[int, int]]:
    """Return pairs of the places of an argument and of its array."""
    flattened = enumerate(leaves(step.args))
    return [(i, names.index(arg)) for i, arg in flattened if isinstance(arg, str) and arg in names]


def _runs(places: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[slice, slice]]]:
    """Return the places of single arguments, and of runs that are contiguous in both lists."""
    found: list[list[tuple[int, int]]] = []
    for i, which in places:
        if found and found[-1][-1] == (i - 1, which - 1):
            found[-1].append((i, which))
        else:
            found.append([(i, which)])
    slices = [tuple(slice(first, last + 1) for first, last in zip(r[0], r[-1])) for r in found if len(r) > 1]
    return [r[0] for r in found if len(r) == 1], [(own, given) for own, given in slices]


def _simulated(value: Any, kind: Any, name: str | None) -> Any:
    """Return an argument in the form that a compiled kernel would get: a Python int, a typed float, or memory."""
    if isinstance(value, np.ndarray):
        return value.ctypes.data if isinstance(kind, types.Integer) else flat(value, name or "")
    typed = {f32: np.float32, f64: np.float64}
    return typed[kind](value) if kind in typed else value


def _resident_blocks(function: Any, step: Step, shared_bytes: int) -> int:
    """Return how many blocks of a kernel the current GPU runs at once."""
    from cuda.core import Device as CoreDevice, LaunchConfig

    here, threads, cluster = CoreDevice(), step.kernel.threads, step.kernel.cluster
    if cluster > 1:
        config = LaunchConfig(grid=1, block=threads, shmem_size=shared_bytes, cluster=cluster)
        return function.occupancy.max_active_clusters(config, stream=here.default_stream) * cluster
    each = function.occupancy.max_active_blocks_per_multiprocessor(threads, shared_bytes)
    return each * here.properties.multiprocessor_count


def leaves(args: Any) -> Iterator[Any]:
    """Yield the arguments, or their types, inside nested tuples, in order."""
    for arg in args:
        if isinstance(arg, (tuple, types.BaseTuple)):
            yield from leaves(arg)
        else:
            yield arg


def nested(like: Any, values: Iterator[Any]) -> Any:
    """Return `values` in nested tuples like those of `like`."""
    if not isinstance(like, tuple):
        return next(values)
    inner = [nested(part, values) for part in like]
    return type(like)(*inner) if hasattr(like, "_fields") else tuple(inner)


def _has_place(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.size > 0


def flat(array: np.ndarray, name: str) -> simulator.Pointer:
    """Return a kernel's pointer to the memory of a NumPy array, from its first element to its last."""
    words = array.view({1: np.uint8, 2: np.uint16}.get(array.dtype.itemsize, array.dtype))
    extent = ArrayMeta.of_numpy(array).extent
    return simulator.Pointer(np.lib.stride_tricks.as_strided(words, (extent,), (words.itemsize,)), name)


def _word(value: Any, kind: Any) -> int:
    """Return the 8 bytes in which the driver finds an argument; a shorter one is in the first bytes."""
    if kind is f32:
        return int(np.float32(value).view(np.uint32))
    return int(np.float64(value).view(np.uint64)) if kind is f64 else int(value)


@cache
def load(kernel: Kernel, arch: str, shared_bytes: int) -> tuple[Any, list[Any]]:
    """Return the kernel on the GPU, an object of cuda.core, and the types of its arguments."""
    from cuda.core import ObjectCode

    made = binary(kernel, arch, shared_bytes)
    function = ObjectCode.from_cubin(made.cubin).get_kernel(made.entry)
    kinds = driver.cu.CUfunction_attribute
    if shared_bytes > 48 * 1024 or made.report.static_shared + shared_bytes > 48 * 1024:
        kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _allow(kernel, function, kind, shared_bytes, f"{shared_bytes} bytes of shared memory")
    if kernel.cluster > PORTABLE_CLUSTER:
        kind = kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        _allow(kernel, function, kind, 1, f"clusters of {kernel.cluster} blocks")
    return function, [*leaves(kernel.argtypes)]


def _allow(kernel: Kernel, function: Any, kind: Any, value: int, request: str) -> None:
    """Set an attribute of a loaded kernel on every GPU. Raises a RuntimeError that names `request`."""
    cu = driver.cu
    handle = cu.CUkernel(int(function.handle))
    for index in range(cu.cuDeviceGetCount()[1]):
        (error,) = cu.cuKernelSetAttribute(kind, value, handle, index)
        if error != cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{kernel.identity}: {request} were refused: {error}")
