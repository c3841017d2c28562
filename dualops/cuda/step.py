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
from .sizes import Size, concrete

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


def prepare(step: Step, names: Sequence[str | None], device: Device) -> Callable[..., None]:
    """A function that launches `step`, given a stream and the pointers (or, simulated, the arrays) of `names` in order.

    None among the names is an array that no argument means.
    """
    made = launcher(step, names, device)
    return made(*made.numbers())


def launcher(step: Step, names: Sequence[str | None], device: Device) -> Launcher | SimulatedLauncher:
    """The same for many steps that differ in numbers alone."""
    return (SimulatedLauncher if SIMULATED else Launcher)(step, names, device)


class Launcher:
    """A step's kernel on the GPU. Called with a grid and arguments, it gives the function that launches it so."""

    def __init__(self, step: Step, names: Sequence[str | None], device: Device):
        from cuda.core import LaunchConfig, launch

        self.step, self.config, self.launch = step, LaunchConfig, launch
        shared_bytes, cluster = concrete(step.shared_bytes), step.kernel.cluster
        self.function, self.casts = load(step.kernel, device.arch, shared_bytes)
        self.options = {"block": step.kernel.threads, "shmem_size": shared_bytes}
        if cluster > 1:
            self.options["cluster"] = cluster
        self.most_blocks = _resident_blocks(self.function, step, self.options) if step.resident else None
        self.places = _places(step, names)
        self.typed_places = [(i, which, self.casts[i]) for i, which in self.places if self.casts[i] is not int]
        self.typed = [(i, cast) for i, cast in enumerate(self.casts) if cast is not int]

    def numbers(self) -> tuple[tuple[Any, ...], list[Any]]:
        """The step's grid and arguments, these without their tuples; of a traced call some are sizes."""
        blocks, *rest = self.step.grid
        if self.most_blocks is not None:
            blocks = min(blocks, self.most_blocks)
        args = [0 if isinstance(arg, str) else arg for arg in leaves(self.step.args)]
        for i, cast in self.typed:
            args[i] = args[i] if isinstance(args[i], Size) else cast(args[i])
        self.untyped = [(i, cast) for i, cast in self.typed if isinstance(args[i], Size)]
        return (blocks // self.step.kernel.cluster, *rest), args

    def __call__(self, grid: tuple[int, ...], args: list[Any]) -> Callable[[Sequence[int], int], None]:
        launch, config, function = self.launch, self.config(grid=grid, **self.options), self.function
        places, typed_places = self.places, self.typed_places
        for i, cast in self.untyped:
            args[i] = cast(args[i])

        def run(pointers: Sequence[int], handle: int) -> None:
            own = args.copy()
            for i, which in places:
                own[i] = pointers[which]
            for i, which, cast in typed_places:
                own[i] = cast(pointers[which])
            launch(_stream(handle), config, function, *own)

        return run


class SimulatedLauncher:
    """The same in the simulator, where arrays stand for their pointers."""

    def __init__(self, step: Step, names: Sequence[str | None], device: Device):
        self.step, self.names = step, names
        self.places = _places(step, names)
        self.kinds = [*leaves(step.kernel.argtypes)]

    def numbers(self) -> tuple[tuple[Any, ...], list[Any]]:
        blocks, *rest = self.step.grid
        if self.step.resident:  # one cluster, which has to take every piece of work
            blocks = self.step.kernel.cluster
        return (blocks, *rest), [0 if isinstance(arg, str) else arg for arg in leaves(self.step.args)]

    def __call__(self, grid: tuple[int, ...], args: list[Any]) -> Callable[[Sequence[Any]], None]:
        step, names = self.step, self.names
        scalars = [_simulated(value, kind, "") for value, kind in zip(args, self.kinds, strict=True)]

        def run(arrays: Sequence[Any]) -> None:
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
                )

        return run


def _places(step: Step, names: Sequence[str | None]) -> list[tuple[int, int]]:
    """Which arguments are which of the arrays."""
    flattened = enumerate(leaves(step.args))
    return [(i, names.index(arg)) for i, arg in flattened if isinstance(arg, str) and arg in names]


def _simulated(value: Any, kind: Any, name: str | None) -> Any:
    """An argument as it would reach the compiled kernel: a Python int, a typed float, or memory."""
    if isinstance(value, np.ndarray):
        return value.ctypes.data if isinstance(kind, types.Integer) else flat(value, name or "")
    typed = {f32: np.float32, f64: np.float64}
    return typed[kind](value) if kind in typed else value


def _resident_blocks(function: Any, step: Step, options: dict[str, Any]) -> int:
    """Blocks of a kernel that the current GPU runs at once."""
    from cuda.core import Device as CoreDevice, LaunchConfig

    here, cluster = CoreDevice(), step.kernel.cluster
    if cluster > 1:
        config = LaunchConfig(grid=1, **options)
        return function.occupancy.max_active_clusters(config, stream=here.default_stream) * cluster
    each = function.occupancy.max_active_blocks_per_multiprocessor(options["block"], options["shmem_size"])
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
