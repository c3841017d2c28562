"""Plans: a call that was bound, configured, compiled and loaded once, ready to launch again with other pointers.

An operator hands an `Operation` its spec and `choices(problem, device)`: every way to do the problem, best first. A call
looks for its plan by the layouts of its arrays and its parameters before anything else is done; only a call of a new
layout is bound by the spec, configured and, if its kernel is new, compiled. Nothing here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..spec import OPERATORS, ArrayMeta, Problem, Spec, Tag
from ..spec.base import Case, contiguous_strides
from . import device as devices
from . import simulator
from .arrays import ADAPTERS, Adapter, adapter_of
from .backend import SIMULATED, Kernel, f32, f64, i32
from .compile import Report, binary, compile_kernel
from .device import Device


MOST_PLANS = 10_000  # an operation keeps so many, a few kilobytes each, and then begins anew


class Step(NamedTuple):
    """One launch. An argument that is a string is the array of that name, or a null pointer if there is none."""

    kernel: Kernel
    grid: tuple[int, ...]  # blocks
    args: tuple[str | int | float, ...]
    shared_bytes: int = 0
    resident: bool = False  # no more blocks than run at once: the kernel's blocks take one piece of work after another


class Choice(NamedTuple):
    """One way to do a problem: the rung, its Config, why it stands where it does, and the launches."""

    rung: str
    config: Any
    reason: str
    steps: Callable[[], Sequence[Step]]


class Result(NamedTuple):
    """An array that a plan writes."""

    name: str
    meta: ArrayMeta
    allocate: Callable[[], Any]


class Plan:
    """A problem with the choice taken, its kernels loaded."""

    def __init__(
        self,
        op: str,
        problem: Problem,
        choice: Choice,
        adapter: Adapter,
        results: tuple[Result, ...],
        device: Device,
        inplace: tuple[str, ...],
    ):
        self.op, self.problem, self.choice, self.adapter, self.results = op, problem, choice, adapter, results
        self.device_index = device.index
        names = [*problem.arrays, *(result.name for result in results)]
        self.metas = [*problem.arrays.values(), *(result.meta for result in results)]
        self.steps = choice.steps()
        self.launches = [prepare(step, names, device) for step in self.steps]
        self.apart = list(self._pairs(inplace))

    def _pairs(self, inplace: tuple[str, ...]) -> Iterator[tuple[int, int, int, int, bool]]:
        """Results and arrays before them that may not meet in memory: i, j, their bytes, if the same place is allowed."""
        metas = self.metas
        nbytes = [meta.nbytes for meta in metas]
        allowed = [name in inplace for name in self.problem.arrays]
        for i in range(len(allowed), len(metas)):
            for j in range(i):
                same = j < len(allowed) and allowed[j] and metas[i].strides == metas[j].strides
                yield i, j, nbytes[i], nbytes[j], same

    def check_overlap(self, pointers: Sequence[int]) -> None:
        """Raise ValueError where a result that the caller gave shares memory with another array and may not."""
        for i, j, my_bytes, their_bytes, same_place_allowed in self.apart:
            mine, theirs = pointers[i], pointers[j]
            if same_place_allowed and mine == theirs:
                continue
            if mine < theirs + their_bytes and theirs < mine + my_bytes:
                names = [*self.problem.arrays, *(f"out {result.name}" for result in self.results)]
                raise ValueError(f"{self.op}: {names[i]} overlaps {names[j]} in memory, expected memory of its own")

    def run(self, arrays: Sequence[Any], pointers: Sequence[int], stream: Any) -> None:
        """Launch on all arrays, results last, whose addresses are `pointers`."""
        if SIMULATED:
            for launch in self.launches:
                launch(arrays)
            return
        handle = self.adapter.stream(arrays[0]) if stream is None else _handle(stream)
        elsewhere = self.adapter.on_device(self.device_index)
        if elsewhere is None:
            for launch in self.launches:
                launch(pointers, handle)
        else:
            with elsewhere:
                for launch in self.launches:
                    launch(pointers, handle)

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"rung {self.choice.rung}, {self.choice.config}: {self.choice.reason}"]
        lines += [f"{s.kernel.name}: {s.grid} blocks of {s.kernel.threads} threads" for s in self.steps]
        return "\n".join(lines if self.steps else [*lines, "nothing to launch: the result is empty"])


Choices = Callable[[Problem, Mapping[str, ArrayMeta], Device], Iterable[Choice]]


class Operation:
    """A direction of an operator, callable on arrays. See the module's docstring.

    `choices(problem, results, device)`: results are the arrays to write, as the caller gave them or as they will be made.
    """

    def __init__(
        self, spec: Spec, choices: Choices, *, backward: bool = False, inplace: tuple[str, ...] = ()
    ):
        self.spec, self.choices, self.backward, self.inplace = spec, choices, backward, inplace
        self.op = f"{spec.name}_backward" if backward else spec.name
        self.inputs = [wanted.name for wanted in (spec.gradient_inputs if backward else spec.inputs)]
        self.outputs = spec.gradients if backward else spec.outputs
        self.params = [param.name for param in spec.params]
        self.plans: dict[Any, Plan] = {}
        OPERATIONS.setdefault(spec.name, []).append(self)

    def __call__(self, arrays: tuple[Any, ...], params: tuple[Any, ...], out: Any, kernel: str | None, stream: Any) -> Any:
        """Do it: `arrays` and `params` in the spec's order, `out` None or the results' arrays."""
        given = () if out is None else out if isinstance(out, tuple) else tuple(out) if isinstance(out, list) else (out,)
        everything = (*arrays, *given)
        try:
            adapter = ADAPTERS[type(arrays[0])]
            pointers = [adapter.pointer(array) for array in everything]
            # 1, 1.0 and True are equal and not the same parameter, so their types count too
            key = (type(arrays[0]), adapter.layouts(everything, pointers), params, *map(type, params), kernel)
            plan = self.plans.get(key)
        except (KeyError, TypeError, AttributeError):
            key = plan = None
        if plan is None:
            plan = self.plan(arrays, params, given if out is not None else None, kernel)
            pointers = [plan.adapter.pointer(array) for array in everything]
            if key is not None:
                if len(self.plans) >= MOST_PLANS:
                    self.plans.clear()
                self.plans[key] = plan
        if out is not None:
            plan.check_overlap(pointers)
            plan.run(everything, pointers, stream)
            return out
        results = [result.allocate() for result in plan.results]
        pointers += [plan.adapter.pointer(result) for result in results]
        plan.run((*arrays, *results), pointers, stream)
        return results[0] if len(results) == 1 else tuple(results)

    def plan(
        self, arrays: tuple[Any, ...], params: tuple[Any, ...], out: tuple[Any, ...] | None = None, kernel: str | None = None
    ) -> Plan:
        """A new plan for such a call. Raises the spec's errors; launches nothing."""
        if not SIMULATED:
            devices.require()
        adapter = self._one_library(arrays)
        metas = dict(zip(self.inputs, map(adapter.meta, arrays), strict=True))
        bind = self.spec.bind_backward if self.backward else self.spec.bind
        problem = bind(metas, dict(zip(self.params, params, strict=True)))
        device = self._device(problem)
        wanted = problem.outputs(self.outputs)
        placed = wanted if out is None else self._check_out(wanted, out, adapter)
        choice = self._choose(problem, placed, device, kernel)
        allocators = [_given if out is not None else adapter.allocator(meta) for meta in placed.values()]
        results = tuple(Result(name, placed[name], make) for name, make in zip(placed, allocators, strict=True))
        return Plan(self.op, problem, choice, adapter, results, device, self.inplace)

    def _one_library(self, arrays: tuple[Any, ...]) -> Adapter:
        adapters = [adapter_of(array, self.op, name) for name, array in zip(self.inputs, arrays, strict=True)]
        for name, array, adapter in zip(self.inputs, arrays, adapters, strict=True):
            if type(adapter) is not type(adapters[0]):
                raise TypeError(
                    f"{self.op}: {name} is a {type(array).__qualname__}, {self.inputs[0]} a "
                    f"{type(arrays[0]).__qualname__}, expected arrays of one library"
                )
        return adapters[0]

    def _check_out(self, wanted: Mapping[str, ArrayMeta], out: tuple[Any, ...], adapter: Adapter) -> dict[str, ArrayMeta]:
        if len(out) != len(wanted):
            raise ValueError(f"{self.op}: out has {len(out)} arrays, expected {len(wanted)}: {', '.join(wanted)}")
        for name, array in zip(wanted, out, strict=True):
            if type(adapter_of(array, self.op, f"out {name}")) is not type(adapter):
                raise TypeError(f"{self.op}: out {name} is a {type(array).__qualname__}, expected the inputs' library")
        metas = {name: adapter.meta(array) for name, array in zip(wanted, out, strict=True)}
        self.spec.bind_out(self.op, wanted, metas)
        return metas

    def _device(self, problem: Problem) -> Device:
        name, meta = next(iter(problem.arrays.items()))
        if SIMULATED:
            return devices.current()
        kind, _, index = meta.device.partition(":")
        if kind != "cuda":
            raise TypeError(f"{self.op}: {name} is on {meta.device}, expected an array on a GPU")
        return devices.at(int(index or 0))

    def _choose(
        self, problem: Problem, results: Mapping[str, ArrayMeta], device: Device, rung: str | None
    ) -> Choice:
        if rung is not None and rung not in self.spec.rungs:
            raise ValueError(f"{self.op}: kernel is {rung!r}, expected one of {', '.join(self.spec.rungs)}")
        for choice in self.choices(problem, results, device):
            if rung is None or choice.rung == rung:
                return choice
        raise NotImplementedError(f"{self.op}: rung {rung or 'any'} does not do {problem} on {device.name}")

    def every_step(self, case: Case, device: Device) -> Iterator[Step]:
        """The launches that each rung would make for the shapes of a case, on arrays that do not exist."""
        names = self.inputs
        shape_of = {**case.shapes}
        if self.backward:
            forward = self.spec.bind(_absent(shape_of, case.dtype), case.params)
            results = {name: meta.shape for name, meta in forward.outputs().items()}
            shape_of |= results | {f"d{name}": shape for name, shape in results.items()}
        metas = _absent({name: shape_of[name] for name in names}, case.dtype)
        bind = self.spec.bind_backward if self.backward else self.spec.bind
        problem = bind(metas, case.params)
        rungs = set()
        for choice in self.choices(problem, problem.outputs(self.outputs), device):
            if choice.rung not in rungs:
                rungs.add(choice.rung)
                yield from choice.steps()


OPERATIONS: dict[str, list[Operation]] = {}  # forward first


def plan(
    operator: str, *arrays: Any, out: Any = None, kernel: str | None = None, backward: bool = False, **params: Any
) -> Plan:
    """How a call would be done: `print(plan("softmax", x, axis=0))` says the rung, the Config and why. Launches nothing.

    operator: "softmax", "flash_attention", ...; arrays, params, out, kernel: as the operator takes them. Raises what the
    call itself would raise.
    """
    if operator not in OPERATIONS:
        raise ValueError(f"plan: operator is {operator!r}, expected one of {', '.join(OPERATIONS)}")
    directions = OPERATIONS[operator]
    if backward and len(directions) < 2:
        raise NotImplementedError(f"plan: {operator} has no backward yet")
    operation = directions[1 if backward else 0]
    spec_params = {param.name: param.default for param in operation.spec.params}
    if unknown := params.keys() - spec_params.keys():
        raise TypeError(f"{operator}: unknown parameter {', '.join(sorted(unknown))}, expected {', '.join(spec_params)}")
    given = None if out is None else tuple(out) if isinstance(out, (tuple, list)) else (out,)
    return operation.plan(arrays, tuple({**spec_params, **params}.values()), given, kernel)


def check_builds(arch: str) -> Iterator[Report]:
    """Compile the COMPILE cases of every operator for `arch`, each kernel once, and report. Needs no GPU."""
    seen: set[str] = set()
    for name, spec in OPERATORS.items():
        for case in spec.tagged(Tag.COMPILE):
            for operation in OPERATIONS[name]:
                for step in operation.every_step(case, devices.known(arch)):
                    if step.kernel.identity not in seen:
                        seen.add(step.kernel.identity)
                        yield compile_kernel(step.kernel, arch, step.shared_bytes).report


def _absent(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, ArrayMeta]:
    return {name: ArrayMeta(shape, dtype, contiguous_strides(shape), "cuda:0", 0) for name, shape in shapes.items()}


def _given() -> Any:
    raise RuntimeError("results that the caller gave are not allocated")


# --- one launch --------------------------------------------------------------------------------------


def prepare(step: Step, names: Sequence[str], device: Device) -> Callable[..., None]:
    """A function that launches `step`, given the pointers (or, simulated, the arrays) of `names` in order."""
    places = [(i, names.index(arg)) for i, arg in enumerate(step.args) if isinstance(arg, str) and arg in names]
    fixed = [0 if isinstance(arg, str) else arg for arg in step.args]
    if SIMULATED:
        return _simulated(step, names, places, fixed)
    from cuda.core import LaunchConfig, launch

    function, casts = load(step.kernel, device.arch, step.shared_bytes)
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
        launch(_stream(handle), config, function, *args)

    return run


def _resident_blocks(function: Any, step: Step, options: dict[str, Any]) -> int:
    """Blocks of a kernel that the GPU runs at once."""
    from cuda.core import Device as CoreDevice
    from cuda.core import LaunchConfig

    here, cluster = CoreDevice(), step.kernel.cluster
    if cluster > 1:
        config = LaunchConfig(grid=1, **options)
        return function.occupancy.max_active_clusters(config, stream=here.default_stream) * cluster
    each = function.occupancy.max_active_blocks_per_multiprocessor(step.kernel.threads, step.shared_bytes)
    return each * here.properties.multiprocessor_count


def _simulated(
    step: Step, names: Sequence[str], places: list[tuple[int, int]], fixed: list[Any]
) -> Callable[[Sequence[Any]], None]:
    # Python ints and typed floats reach the simulator as they would reach the compiled kernel
    typed = {f32: np.float32, f64: np.float64}
    scalars = [typed[kind](v) if kind in typed else v for v, kind in zip(fixed, step.kernel.argtypes, strict=True)]

    grid = step.grid
    if step.resident:  # one cluster, which has to take every piece of work
        grid = (step.kernel.cluster, *grid[1:])

    def run(arrays: Sequence[Any]) -> None:
        args = list(scalars)
        for place, which in places:
            args[place] = flat(arrays[which], names[which])
        simulator.launch(
            step.kernel.function,
            grid,
            (step.kernel.threads,),
            args,
            cluster=step.kernel.cluster,
            shared_bytes=step.shared_bytes,
        )

    return run


def flat(array: np.ndarray, name: str) -> simulator.Pointer:
    """The memory of a NumPy array from its first element to its last, as a kernel's pointer."""
    words = array.view(np.uint16) if array.dtype.itemsize == 2 else array
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
        for index in range(driver.cuDeviceGetCount()[1]):
            (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, driver.CUkernel(int(function.handle)), index)
            if error != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{kernel.identity}: {shared_bytes} bytes of shared memory were refused: {error}")
    return function, [_cast(kind) for kind in kernel.argtypes]


@cache
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


def _handle(stream: Any) -> int:
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
