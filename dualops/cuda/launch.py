"""Plans: a call that was bound, configured, compiled and loaded once, ready to launch again with other pointers.

An operator hands an `Operation` its spec and `choices(problem, results, device)`: every way to do the problem, best
first. A call looks for its plan by the layouts of its arrays and its parameters before anything else is done; only a
call of a new layout is bound by the spec, configured and, if its kernel is new, compiled. Nothing here waits for the
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..spec import ArrayMeta, Problem, Spec
from ..spec.attention import UserFunction
from ..spec.meta import FLOATS, number_meta, take_turns
from . import device as devices
from .arrays import ADAPTERS, Adapter, adapter_of
from .backend import SIMULATED, NumbaError
from .device import Device
from .step import Step, handle_of, prepare

NUMBERS = (int, float)  # on the host, as a launch passes them on
MOST_PLANS = 10_000  # an operation keeps so many, a few kilobytes each, and then begins anew


class Choice(NamedTuple):
    """One way to do a problem: the rung, its Config, why it stands where it does, and the launches."""

    rung: str
    config: Any
    reason: str
    steps: Callable[[], Sequence[Step]]
    workspace: Mapping[str, ArrayMeta] = {}  # arrays that live from the first launch to the last


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
        inplace: frozenset[tuple[str, str]],
    ):
        self.op, self.problem, self.choice, self.adapter, self.results = op, problem, choice, adapter, results
        self.device_index = device.index
        names = [*problem.arrays, *(result.name for result in results), *choice.workspace]
        self.workspace = [adapter.allocator(meta) for meta in choice.workspace.values()]
        self.metas = [*problem.arrays.values(), *(result.meta for result in results)]
        self.steps = choice.steps()
        self.launches = [prepare(step, names, device) for step in self.steps]
        self.names = [*problem.arrays, *(result.name for result in results)]
        self.apart = list(self._pairs(inplace))

    def _pairs(self, inplace: frozenset[tuple[str, str]]) -> Iterator[tuple[int, int, int, int, bool]]:
        """Results and arrays before them that may not meet in memory: i, j, their bytes, if one place is allowed."""
        metas, names = self.metas, self.names
        nbytes = [meta.nbytes for meta in metas]
        for i in range(len(self.problem.arrays), len(metas)):
            for j in range(i):
                if metas[j].device == "host":
                    continue
                same = (names[i], names[j]) in inplace and metas[i].strides == metas[j].strides
                yield i, j, nbytes[i], nbytes[j], same

    def check_overlap(self, pointers: Sequence[int]) -> None:
        """Raise ValueError where a result that the caller gave shares memory with another array and may not."""
        for i, j, my_bytes, their_bytes, same_place_allowed in self.apart:
            mine, theirs = pointers[i], pointers[j]
            if same_place_allowed and mine == theirs:
                continue
            if mine < theirs + their_bytes and theirs < mine + my_bytes:
                if take_turns(self.metas[i]._replace(pointer=mine), self.metas[j]._replace(pointer=theirs)):
                    continue
                mine, theirs = (self._told(k, pointers) for k in (i, j))
                raise ValueError(f"{self.op}: {mine} overlaps {theirs} in memory, expected memory of its own")

    def _told(self, i: int, pointers: Sequence[int]) -> str:
        """What a message calls an array: a result that overwrites its input by the input's name."""
        name, inputs = self.names[i], len(self.problem.arrays)
        source = self.problem.spec.updates.get(name)
        if i < inputs:
            return name
        return source if source and pointers[i] == pointers[self.names.index(source)] else f"out {name}"

    def run(self, arrays: Sequence[Any], pointers: Sequence[int], stream: Any) -> None:
        """Launch on all arrays, results last, whose addresses are `pointers`."""
        handle = None if stream is None else stream_of(self.op, stream)
        workspace = [allocate() for allocate in self.workspace]
        if SIMULATED:
            for launch in self.launches:
                launch([*arrays, *workspace])
            return
        if handle is None:
            handle = self.adapter.stream(arrays[0])
        if workspace:
            pointers = [*pointers, *map(self.adapter.pointer, workspace)]
            if stream is not None:
                for array in workspace:
                    self.adapter.used_on(array, handle)
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
        lines += [f"{name} {meta.shape}: {meta.nbytes} bytes beside" for name, meta in self.choice.workspace.items()]
        return "\n".join(lines if self.steps else [*lines, "nothing to launch: the result is empty"])


Choices = Callable[[Problem, Mapping[str, ArrayMeta], Device], Iterable[Choice]]


class Operation:
    """A direction of an operator, callable on arrays. See the module's docstring.

    `choices(problem, results, device)`: results are the arrays to write, as the caller gave them or as they will be
    made. Where the spec says that results update inputs, those are the arrays to write unless out= is given.
    inplace: inputs that out= may be; or of each result the one input that it may be.
    """

    def __init__(
        self,
        spec: Spec,
        choices: Choices,
        *,
        backward: bool = False,
        inplace: tuple[str, ...] | Mapping[str, str] = (),
    ):
        self.spec, self.choices, self.backward = spec, choices, backward
        self.op = f"{spec.name}_backward" if backward else spec.name
        inputs = spec.gradient_inputs if backward else spec.inputs
        self.inputs = [wanted.name for wanted in inputs]
        self.plain = not any(wanted.optional or wanted.host for wanted in inputs)  # every input is an array
        self.host = {wanted.name: wanted.dtypes for wanted in inputs if wanted.host}
        self.outputs = spec.gradients if backward else spec.outputs
        updates = {} if backward else spec.updates
        self.updated = [self.inputs.index(updates[output.name]) for output in self.outputs if output.name in updates]
        self.inplace = tuple(inplace.values()) if isinstance(inplace, Mapping) else inplace
        # (result, input) that may be one place
        any_place = product([output.name for output in self.outputs], self.inplace)
        places = inplace.items() if isinstance(inplace, Mapping) else any_place
        self.same_place = frozenset({*places, *updates.items()})
        accepted = (*spec.params, *(spec.gradient_params if backward else ()))
        self.defaults = {param.name: param.default for param in accepted}
        self.plans: dict[Any, Plan] = {}
        OPERATIONS.setdefault(spec.name, []).append(self)

    def __call__(
        self, arrays: tuple[Any, ...], params: tuple[Any, ...], out: Any, kernel: str | None, stream: Any
    ) -> Any:
        """Do it: `arrays` and `params` in the spec's order, `out` None or the results' arrays."""
        given = () if out is None else _results_of(out)
        if self.updated and out is None:
            given = self._overwritten(arrays)
            out = given[0] if len(given) == 1 else given
        present, which = (arrays, ()) if self.plain else self._present(arrays)
        everything = (*present, *given)
        pointers: list[int] = []
        try:
            adapter = ADAPTERS[type(arrays[0])]
            pointers = _pointers(adapter, everything)
            # 1, 1.0 and True are equal and not the same parameter, so their types count too
            layouts = adapter.layouts(everything, pointers) if self.plain else _layouts(adapter, everything, pointers)
            key = (type(arrays[0]), layouts, which, params, *map(type, params), kernel)
            plan = self.plans.get(key)
        except (KeyError, TypeError, AttributeError):
            key = plan = None
        if plan is None:
            plan = self.plan(arrays, params, given if out is not None else None, kernel)
            pointers = _pointers(plan.adapter, everything)
            if key is not None:
                if len(self.plans) >= MOST_PLANS:
                    self.plans.clear()
                self.plans[key] = plan
        elif SIMULATED:
            self._check_values(plan.problem, everything)
        if out is not None:
            plan.check_overlap(pointers)
            plan.run(everything, pointers, stream)
            return out
        results = [result.allocate() for result in plan.results]
        pointers += [plan.adapter.pointer(result) for result in results]
        plan.run((*present, *results), pointers, stream)
        return results[0] if len(results) == 1 else tuple(results)

    def _overwritten(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs that results are written to where there is no out=."""
        return tuple(arrays[place] for place in self.updated if arrays[place] is not None)

    def _present(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """The arrays that are there, numbers on the host as Python's; and of each whether it is there."""
        present = [
            on_host(array, self.op, name, self.host[name]) if name in self.host else array
            for name, array in zip(self.inputs, arrays, strict=True)
        ]
        return tuple(array for array in present if array is not None), tuple(array is not None for array in present)

    def _check_values(self, problem: Problem, arrays: Sequence[Any]) -> None:
        """What the spec says of values, where they can be seen without waiting for a GPU."""
        if self.spec.values:
            self.spec.values(self.op, dict(zip(problem.arrays, arrays)), problem)

    def plan(
        self,
        arrays: tuple[Any, ...],
        params: tuple[Any, ...],
        out: tuple[Any, ...] | None = None,
        kernel: str | None = None,
    ) -> Plan:
        """A new plan for such a call. Raises the spec's errors; launches nothing."""
        if not SIMULATED:
            devices.require()
        present, which = self._present(arrays)
        names = [name for name, there in zip(self.inputs, which, strict=True) if there]
        adapter = self._one_library(names, present)
        metas = {
            name: number_meta(array, self.op, name, self.host[name]) if type(array) in NUMBERS else adapter.meta(array)
            for name, array in zip(names, present, strict=True)
        }
        bind = self.spec.bind_backward if self.backward else self.spec.bind
        problem = bind(metas, dict(zip(self.defaults, params, strict=True)))
        if SIMULATED:
            self._check_values(problem, present)
        device = device_of(self.op, *next(iter(problem.arrays.items())))
        wanted = problem.outputs(self.outputs)
        if self.updated and out is None:
            out = self._overwritten(arrays)
        placed = wanted if out is None else self._check_out(wanted, out, adapter, problem)
        choice = self._choose(problem, placed, device, kernel)
        allocators = [_given if out is not None else adapter.allocator(meta) for meta in placed.values()]
        results = tuple(Result(name, placed[name], make) for name, make in zip(placed, allocators, strict=True))
        try:
            return Plan(self.op, problem, choice, adapter, results, device, self.same_place)
        except NumbaError as error:
            raise TypeError(f"{self.op}: {_not_compiled(problem, error)}") from error

    def _one_library(self, names: Sequence[str], arrays: Sequence[Any]) -> Adapter:
        found: Adapter | None = None
        for name, array in zip(names, arrays, strict=True):
            if type(array) in NUMBERS and name in self.host:
                continue
            adapter = adapter_of(array, self.op, name)
            found = found or adapter
            if type(adapter) is not type(found):
                raise TypeError(
                    f"{self.op}: {name} is a {type(array).__qualname__}, {names[0]} a "
                    f"{type(arrays[0]).__qualname__}, expected arrays of one library"
                )
        if found is None:
            raise TypeError(f"{self.op}: {self.inputs[0]} is missing, expected an array")
        return found

    def _check_out(
        self, wanted: Mapping[str, ArrayMeta], out: tuple[Any, ...], adapter: Adapter, problem: Problem
    ) -> dict[str, ArrayMeta]:
        if len(out) != len(wanted):
            raise ValueError(f"{self.op}: out has {len(out)} arrays, expected {len(wanted)}: {', '.join(wanted)}")
        for name, array in zip(wanted, out, strict=True):
            if type(adapter_of(array, self.op, f"out {name}")) is not type(adapter):
                raise TypeError(f"{self.op}: out {name} is a {type(array).__qualname__}, expected the inputs' library")
        metas = {name: adapter.meta(array) for name, array in zip(wanted, out, strict=True)}
        updates = {} if self.backward else self.spec.updates
        told = {name: x for name, x in updates.items() if name in metas and metas[name] == problem.arrays[x]}
        self.spec.bind_out(self.op, wanted, metas, told)
        return metas

    def _choose(self, problem: Problem, results: Mapping[str, ArrayMeta], device: Device, rung: str | None) -> Choice:
        if rung is not None and rung not in self.spec.rungs:
            raise ValueError(f"{self.op}: kernel is {rung!r}, expected one of {', '.join(self.spec.rungs)}")
        for choice in self.choices(problem, results, device):
            if rung is None or choice.rung == rung:
                return choice
        told = "no kernel does" if rung is None else f"rung {rung} does not do"
        strides = ", ".join(f"{name} {meta.strides}" for name, meta in {**problem.arrays, **results}.items())
        raise NotImplementedError(f"{self.op}: {told} {problem} with strides {strides} on {device.name}")


OPERATIONS: dict[str, list[Operation]] = {}  # forward first


def plan(
    operator: str, *arrays: Any, out: Any = None, kernel: str | None = None, backward: bool = False, **params: Any
) -> Plan:
    """How a call would be done: `print(plan("softmax", x, axis=0))` says the rung, the Config and why. Nothing is
    launched.

    operator: "softmax", "flash_attention", ...; arrays, params, out, kernel: as the operator takes them. Raises what
    the call itself would raise.
    """
    if operator not in OPERATIONS:
        raise ValueError(f"plan: operator is {operator!r}, expected one of {', '.join(OPERATIONS)}")
    directions = OPERATIONS[operator]
    if backward and len(directions) < 2:
        raise NotImplementedError(f"plan: {operator} has no backward yet")
    operation = directions[1 if backward else 0]
    inputs = dict(zip(operation.inputs, arrays))
    accepted = dict.fromkeys(operation.inputs) | operation.defaults
    if unknown := params.keys() - (accepted.keys() - inputs.keys()):
        told, expected = ", ".join(sorted(unknown)), ", ".join(accepted)
        raise TypeError(f"{operation.op}: unknown argument {told}, expected {expected}")
    call = accepted | inputs | params
    given = None if out is None else _results_of(out)
    values = [tuple(call[name] for name in names) for names in (operation.inputs, operation.defaults)]
    return operation.plan(values[0], values[1], given, kernel)


def _not_compiled(problem: Problem, error: NumbaError) -> str:
    """What Numba could not make of a function that the user gave, with the line where it says one."""
    told = [line.strip(" :") for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in told if not line.startswith("Failed in")), "")
    for name, value in problem.params.items():
        if isinstance(value, UserFunction):
            code = value.function.__code__
            file = code.co_filename.rpartition("/")[2]
            lines = [line for line in told if line.startswith("File ") and file in line]
            where = lines[-1] if lines else f'File "{code.co_filename}", line {code.co_firstlineno}'
            return f"{name} is {value!r}, expected a function that Numba can compile: {reason} ({where})"
    return reason


def device_of(op: str, name: str, meta: ArrayMeta) -> Device:
    """The GPU that an array is on. Raises TypeError for one that is on none."""
    if SIMULATED:
        return devices.current()
    kind, _, index = meta.device.partition(":")
    if kind != "cuda":
        raise TypeError(f"{op}: {name} is on {meta.device}, expected an array on a GPU")
    return devices.at(int(index or 0))


def stream_of(op: str, stream: Any) -> int:
    """The handle of a stream that the caller gave; 0 in the simulator, where there is one. Raises TypeError, naming the
    operator, for what is no stream.
    """
    if SIMULATED and type(stream).__module__.startswith("numba.cuda.simulator"):  # Numba's own stand-in has no handle
        return 0
    try:
        handle = handle_of(stream)
    except TypeError as error:
        raise TypeError(f"{op}: {error}") from None
    return 0 if SIMULATED else handle


def on_host(value: Any, op: str, name: str, dtypes: Sequence[str]) -> Any:
    """A number on the host as Python's; None and an array on the device as they are."""
    if value is None or (SIMULATED and isinstance(value, np.ndarray)):
        return value
    device = getattr(value, "device", None)
    method = "__float__" if dtypes[0] in FLOATS else "__index__"
    if hasattr(value, method) and (device is None or str(device) == "cpu"):
        return number_meta(value, op, name, dtypes).pointer
    return value


def _pointers(adapter: Adapter, arrays: Sequence[Any]) -> list[int]:
    """The address of every array; of a number on the host its value."""
    return [array if type(array) in NUMBERS else adapter.pointer(array) for array in arrays]


def _layouts(adapter: Adapter, arrays: Sequence[Any], pointers: Sequence[int]) -> Hashable:
    """What a plan depends on; the value of a number on the host is nothing of it."""
    devices = [(array, pointer) for array, pointer in zip(arrays, pointers) if type(array) not in NUMBERS]
    places = tuple((place, type(array)) for place, array in enumerate(arrays) if type(array) in NUMBERS)
    return adapter.layouts(*zip(*devices)), places


def _results_of(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else tuple(out) if isinstance(out, list) else (out,)


def _given() -> Any:
    raise RuntimeError("results that the caller gave are not allocated")
