"""Plans: a call that was bound, configured, compiled and loaded once, ready to launch again with other pointers.

An operator hands an `Operation` its spec and `choices(problem, results, device)`: every way to do the problem, best
first. A call looks for its plan by the layouts of its arrays and its parameters before anything else is done; only a
call of a new layout is bound by the spec, configured and, if its kernel is new, compiled. Nothing here waits for the
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..spec import OPERATORS, ArrayMeta, Problem, Spec, Tag
from ..spec.base import Case, contiguous_strides
from . import device as devices
from .arrays import ADAPTERS, Adapter, adapter_of
from .backend import SIMULATED
from .compile import Report, compile_kernel
from .device import Device
from .step import Step, handle_of, prepare

MOST_PLANS = 10_000  # an operation keeps so many, a few kilobytes each, and then begins anew


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
        """Results and arrays before them that may not meet in memory: i, j, their bytes, if one place is allowed."""
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
        handle = self.adapter.stream(arrays[0]) if stream is None else handle_of(stream)
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

    `choices(problem, results, device)`: results are the arrays to write, as the caller gave them or as they will be
    made.
    """

    def __init__(self, spec: Spec, choices: Choices, *, backward: bool = False, inplace: tuple[str, ...] = ()):
        self.spec, self.choices, self.backward, self.inplace = spec, choices, backward, inplace
        self.op = f"{spec.name}_backward" if backward else spec.name
        self.inputs = [wanted.name for wanted in (spec.gradient_inputs if backward else spec.inputs)]
        self.outputs = spec.gradients if backward else spec.outputs
        self.params = [param.name for param in spec.params]
        self.plans: dict[Any, Plan] = {}
        OPERATIONS.setdefault(spec.name, []).append(self)

    def __call__(
        self, arrays: tuple[Any, ...], params: tuple[Any, ...], out: Any, kernel: str | None, stream: Any
    ) -> Any:
        """Do it: `arrays` and `params` in the spec's order, `out` None or the results' arrays."""
        given = () if out is None else _results_of(out)
        everything = (*arrays, *given)
        pointers: list[int] = []
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
        self,
        arrays: tuple[Any, ...],
        params: tuple[Any, ...],
        out: tuple[Any, ...] | None = None,
        kernel: str | None = None,
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

    def _check_out(
        self, wanted: Mapping[str, ArrayMeta], out: tuple[Any, ...], adapter: Adapter
    ) -> dict[str, ArrayMeta]:
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

    def _choose(self, problem: Problem, results: Mapping[str, ArrayMeta], device: Device, rung: str | None) -> Choice:
        if rung is not None and rung not in self.spec.rungs:
            raise ValueError(f"{self.op}: kernel is {rung!r}, expected one of {', '.join(self.spec.rungs)}")
        for choice in self.choices(problem, results, device):
            if rung is None or choice.rung == rung:
                return choice
        told = "no kernel does" if rung is None else f"rung {rung} does not do"
        strides = ", ".join(f"{name} {meta.strides}" for name, meta in {**problem.arrays, **results}.items())
        raise NotImplementedError(f"{self.op}: {told} {problem} with strides {strides} on {device.name}")

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
    spec_params = {param.name: param.default for param in operation.spec.params}
    if unknown := params.keys() - spec_params.keys():
        told, expected = ", ".join(sorted(unknown)), ", ".join(spec_params)
        raise TypeError(f"{operator}: unknown parameter {told}, expected {expected}")
    given = None if out is None else _results_of(out)
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


def _results_of(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else tuple(out) if isinstance(out, list) else (out,)


def _given() -> Any:
    raise RuntimeError("results that the caller gave are not allocated")
