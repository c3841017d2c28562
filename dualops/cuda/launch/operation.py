"""Operations: one direction (forward or backward) of an operator, callable on arrays.

An `Operation` has an operator's spec and its rungs, which offer ways to compute a problem. A call first looks up its
plan by its parameters and the layouts of its arrays. Only a call with a new layout is inspected further. If no earlier
call's kernels can serve it, the spec validates it, a Config is chosen, and kernels are compiled (`plans`). Nothing here
waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...spec import ArrayMeta, Problem, Spec
from ...spec.attention import UserFunction
from ...spec.domains import length, length_or_all, shown
from ...spec.meta import FLOATS, number_meta
from ..compiler.backend import SIMULATED, NumbaError
from ..tuning.records import Record, fastest_of, recorded, way_of
from . import device as devices
from .arrays import ADAPTERS, NUMBERS, Adapter, adapter_of
from .device import Device
from .plans import Call, Choice as Choice, Choices, Family, Plan, Settled, sizes_of

MOST_PLANS = 10_000  # plans of an operation, a few kilobytes each, before it drops all of them
MOST_FAMILIES = 32  # families of calls that differ only in sizes
WRONG_ARRAYS = (TypeError, ValueError, AttributeError, RuntimeError)  # errors of adapters for wrong arrays

Several = tuple[Any, ...]  # arrays or parameters, in the spec's order; None for a missing array


class Offer(NamedTuple):
    """A way to compute a call, and a function that makes its plan."""

    settled: Settled
    plan: Callable[[], Plan]

    @property
    def choice(self) -> Choice:
        return self.settled.choice

    @property
    def rung(self) -> str:
        return self.choice.rung


class Operation:
    """A direction of an operator, callable on arrays. See the module's docstring.

    rungs: functions of (problem, results, device). Each yields the Choices of one rung, best first. The functions are
    in order, too, best first. So a rung has several functions if its rank depends on the problem. A function yields
    nothing for problems that its rung can't compute. It need not handle empty results, or check that a Choice's shared
    memory fits the device. results: the arrays to write, given by the caller or new. If the spec says that results
    update inputs, these inputs are the arrays to write, unless out= is given.
    inplace: inputs that out= may be; or for each result the one input that it may be.
    """

    def __init__(
        self,
        spec: Spec,
        rungs: Sequence[Choices],
        *,
        backward: bool = False,
        inplace: tuple[str, ...] | Mapping[str, str] = (),
    ):
        self.spec, self.rungs, self.backward = spec, rungs, backward
        self.op = f"{spec.name}_backward" if backward else spec.name
        inputs = spec.gradient_inputs if backward else spec.inputs
        self.inputs = [wanted.name for wanted in inputs]
        self.host = {wanted.name: wanted.dtypes for wanted in inputs if wanted.host}
        self.host_places = [place for place, wanted in enumerate(inputs) if wanted.host]
        self.outputs = spec.gradients if backward else spec.outputs
        self.updates = updates = {} if backward else spec.updates
        self.updated = [self.inputs.index(updates[output.name]) for output in self.outputs if output.name in updates]
        self.inplace = tuple(inplace.values()) if isinstance(inplace, Mapping) else inplace
        # (result, input) that may be the same memory
        any_place = product([output.name for output in self.outputs], self.inplace)
        places = inplace.items() if isinstance(inplace, Mapping) else any_place
        self.same_place = frozenset({*places, *updates.items()})
        accepted = (*spec.params, *(spec.gradient_params if backward else ()))
        self.defaults = {param.name: param.default for param in accepted}
        # parameters that are sizes, and their indices
        self.lengths = {
            param.name: place for place, param in enumerate(accepted) if param.domain in (length, length_or_all)
        }
        self.plans: dict[Any, Plan] = {}
        self.families: dict[Hashable, list[Family]] = {}  # a call without its sizes -> families, latest first
        OPERATIONS.setdefault(spec.name, []).append(self)

    def __call__(self, arrays: Several, params: Several, out: Any, kernel: str | None, stream: Any) -> Any:
        """Run the operation: `arrays` and `params` in the spec's order, `out` None or the results' arrays."""
        for place in self.host_places:
            if arrays[place] is not None:
                arrays = self.with_numbers(arrays)
        given = None
        if out is not None:
            given = results_of(out)
        elif self.updated:
            given = self.overwritten(arrays)
            out = given[0] if len(given) == 1 else given
        plan, pointers = self.find(arrays, params, given, kernel)
        results = plan.run(arrays, pointers, given, stream)
        if given is not None:
            return out
        return results[0] if len(results) == 1 else tuple(results)

    def find(
        self,
        arrays: Several,
        params: Several,
        given: Several | None = None,
        kernel: str | None = None,
        before: Callable[[Settled], None] | None = None,
    ) -> tuple[Plan, list[Any]]:
        """Return the plan of a call, cached or new, and the addresses of its arrays. Host numbers are Python numbers.

        given: the caller's arrays for the results, if any; before: is called with a call that needs a new family,
        before its kernels are built.
        """
        everything = arrays if given is None else (*arrays, *given)
        try:
            adapter = ADAPTERS.get(type(arrays[0])) or adapter_of(arrays[0], self.op, self.inputs[0])
            layouts, pointers = adapter.layouts(everything)
            # 1, 1.0 and True are equal but not the same parameter, so the key contains their types
            key = (type(arrays[0]), layouts, given is None, params, *map(type, params), kernel)
            plan = self.plans.get(key)
        except WRONG_ARRAYS:
            layouts = key = plan = None
            pointers: list[Any] = []
        if plan is None:
            plan = self._new_plan(arrays, params, given, kernel, layouts, before)
            if layouts is None:
                _, pointers = plan.adapter.layouts(everything)
            else:
                if len(self.plans) >= MOST_PLANS:
                    self.forget()
                self.plans[key] = plan
        if SIMULATED:
            self._check_values(plan, arrays)
        return plan, pointers

    def plan(self, arrays: Several, params: Several, out: Several | None = None, kernel: str | None = None) -> Plan:
        """Return a new plan for such a call. Raises the spec's errors. Launches nothing."""
        arrays = self.with_numbers(arrays)
        if self.updated and out is None:
            out = self.overwritten(arrays)
        plan = self._new_plan(arrays, params, out, kernel, None)
        if SIMULATED:
            self._check_values(plan, arrays)
        return plan

    def ways(self, arrays: Several, params: Several, out: Several | None = None) -> Iterator[Offer]:
        """Yield every way to compute such a call, in the operator's order, best first. Launches nothing."""
        adapter, call = self._call(arrays, params, out, None)
        settled = self._settle(call)
        for choice in self.choices(settled.problem, settled.results, settled.device):
            way = settled._replace(choice=choice)
            yield Offer(way, partial(self._plan_of_way, adapter, call, way))

    def _plan_of_way(self, adapter: Adapter, call: Call, way: Settled) -> Plan:
        family = Family(self.op, call, [], self.inputs, self.same_place, adapter, lambda _: way)
        return _own_plan(family, call, [])

    def overwritten(self, arrays: Several) -> Several:
        """Return the inputs to which results are written without out=."""
        return tuple(arrays[place] for place in self.updated if arrays[place] is not None)

    def with_numbers(self, arrays: Several) -> Several:
        """Return the arrays with Python numbers for the host numbers at `host_places`."""
        return tuple(
            on_host(array, self.op, name, self.host[name]) if name in self.host else array
            for name, array in zip(self.inputs, arrays, strict=True)
        )

    def _check_values(self, plan: Plan, arrays: Sequence[Any]) -> None:
        """Check values by the spec, if they can be read without waiting for a GPU."""
        if self.spec.values:
            there = (array for array in arrays if array is not None)
            self.spec.values(self.op, dict(zip(plan.problem.arrays, there)), plan.problem)

    def forget(self) -> None:
        """Drop all plans: the next calls create new ones."""
        self.plans.clear()
        self.families.clear()

    # --- calls of a new layout

    def _new_plan(
        self,
        arrays: Several,
        params: Several,
        out: Several | None,
        kernel: str | None,
        layouts: tuple[Any, ...] | None,
        before: Callable[[Settled], None] | None = None,
    ) -> Plan:
        """Return a plan of a family that serves such calls, or of a new one. layouts: of the arrays, if any."""
        families: list[Family] = []
        lengths: list[str] = []
        if self.lengths:
            lengths = [name for name, at in self.lengths.items() if type(params[at]) is int and params[at] >= 0]
        if layouts is not None:
            adapter = adapter_of(arrays[0], self.op, self.inputs[0])
            sizes, kinds = sizes_of(layouts)
            others = params
            if lengths:
                sizes += [params[self.lengths[name]] for name in lengths]
                others = tuple([None if name in lengths else value for name, value in zip(self.defaults, params)])
            kind = (kinds, out is None, others, *map(type, params), kernel)
            families = self.families.setdefault(kind, families)
            known = partial(self._known_call, adapter, layouts, params, kernel)
            for family in families:
                if (plan := family.plan(sizes, known)) is not None:
                    return plan
        if not SIMULATED:
            devices.require()
        adapter, call = self._call(arrays, params, out, kernel)
        if before is not None:
            before(self._settle(call))
        try:
            family = Family(self.op, call, lengths, self.inputs, self.same_place, adapter, self._settle)
        except NumbaError as error:
            raise TypeError(f"{self.op}: {_not_compiled(call.params, error)}") from error
        families.insert(0, family)
        del families[MOST_FAMILIES:]
        return _own_plan(family, call, lengths)

    def _known_call(self, adapter: Adapter, layouts: Sequence[Any], params: Several, kernel: str | None) -> Call:
        """Return a call of a family, by the layouts of its arrays."""
        metas = [layout if layout is None else _meta_of(layout, adapter) for layout in layouts]
        inputs, out = metas[: len(self.inputs)], metas[len(self.inputs) :]
        arrays = {name: meta for name, meta in zip(self.inputs, inputs) if meta is not None}
        return Call(arrays, tuple(filter(None, out)) or None, dict(zip(self.defaults, params, strict=True)), kernel)

    def _call(self, arrays: Several, params: Several, out: Several | None, kernel: str | None) -> tuple[Adapter, Call]:
        """Return the Call of arguments. Raises TypeError for arguments that are no arrays, or of several libraries."""
        present = {name: array for name, array in zip(self.inputs, arrays, strict=True) if array is not None}
        adapter = self._one_library(present)
        metas = {
            name: number_meta(array, self.op, name, self.host[name])
            if type(array) in NUMBERS and name in self.host
            else self._meta(adapter, name, array)
            for name, array in present.items()
        }
        call = Call(metas, None, dict(zip(self.defaults, params, strict=True)), kernel)
        return adapter, call if out is None else call._replace(out=self._metas_of_results(out, adapter, call))

    def _metas_of_results(self, out: Several, adapter: Adapter, call: Call) -> tuple[ArrayMeta, ...]:
        """Return the metas of the caller's arrays. Raises TypeError or ValueError for one of another library."""
        names = [output.name for output in self.outputs]
        if len(out) != len(names) or any(type(ADAPTERS.get(type(array))) is not type(adapter) for array in out):
            wanted = self._bind(call).outputs(self.outputs)
            self._check_count(wanted, out)
            names = list(wanted)
        metas = []
        for name, array in zip(names, out, strict=True):
            if type(adapter_of(array, self.op, f"out {name}")) is not type(adapter):
                raise TypeError(f"{self.op}: out {name} is a {type(array).__qualname__}, expected the inputs' library")
            metas.append(self._meta(adapter, f"out {name}", array))
        return tuple(metas)

    def _meta(self, adapter: Adapter, name: str, array: Any) -> ArrayMeta:
        """Return the meta of an array. Raises the adapter's error with the argument's name."""
        try:
            return adapter.meta(array)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.op}: {name}: {error}") from None

    def _bind(self, call: Call) -> Problem:
        return (self.spec.bind_backward if self.backward else self.spec.bind)(call.arrays, call.params)

    def _settle(self, call: Call) -> Settled:
        """Return how a call is computed: problem, results, choice, GPU. Raises the spec's errors."""
        problem = self._bind(call)
        device = devices.of_array(self.op, *next(iter(problem.arrays.items())))
        results = problem.outputs(self.outputs)
        if call.out is not None:
            results = self._bind_out(results, call.out, problem)
        return Settled(problem, results, self.choose(problem, results, device, call.rung), device)

    def _bind_out(
        self, wanted: Mapping[str, ArrayMeta], out: Sequence[ArrayMeta], problem: Problem
    ) -> dict[str, ArrayMeta]:
        """Return the caller's arrays for results, by name."""
        self._check_count(wanted, out)
        metas = dict(zip(wanted, out, strict=True))
        names = {name: x for name, x in self.updates.items() if name in metas and metas[name] == problem.arrays[x]}
        self.spec.bind_out(self.op, wanted, metas, names)
        return metas

    def _check_count(self, wanted: Mapping[str, ArrayMeta], out: Sequence[Any]) -> None:
        if len(out) != len(wanted):
            raise ValueError(f"{self.op}: out has {len(out)} arrays, expected {len(wanted)}: {', '.join(wanted)}")

    def _one_library(self, arrays: Mapping[str, Any]) -> Adapter:
        found: Adapter | None = None
        first = next(iter(arrays), self.inputs[0])
        for name, array in arrays.items():
            if type(array) in NUMBERS and name in self.host:
                continue
            adapter = adapter_of(array, self.op, name)
            found = found or adapter
            if type(adapter) is not type(found):
                raise TypeError(
                    f"{self.op}: {name} is a {type(array).__qualname__}, {first} a "
                    f"{type(arrays[first]).__qualname__}, expected arrays of one library"
                )
        if found is None:
            raise TypeError(f"{self.op}: {self.inputs[0]} is missing, expected an array")
        return found

    def choices(self, problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
        """Yield every way to compute a problem on a device, best first."""
        if not any(meta.size for meta in results.values()):
            yield from (Choice(rung, None, "nothing to do", tuple) for rung in reversed(self.spec.rungs))
            return
        for choices in self.rungs:
            for choice in choices(problem, results, device):
                if choice.shared_bytes <= device.shared_memory_per_block:
                    yield choice

    def choose(
        self, problem: Problem, results: Mapping[str, ArrayMeta], device: Device, rung: str | None = None
    ) -> Choice:
        """Choose the kernels of a call: the fastest measured there for similar problems, else the first; or this rung.

        Raises NotImplementedError if no kernel supports the call.
        """
        if rung is not None and not (isinstance(rung, str) and rung in self.spec.rungs):
            raise ValueError(f"{self.op}: kernel is {shown(rung)}, expected one of {', '.join(self.spec.rungs)}")
        if rung is None and (records := recorded(self.op, problem, device, self.lengths)):
            choices = [*self.choices(problem, results, device)]
            if found := fastest_of(choices, records):
                choice, record = found
                return choice._replace(reason=_measured(choice, choices[0], record))
        for choice in self.choices(problem, results, device):
            if rung is None or choice.rung == rung:
                return choice
        refusal = "no kernel does" if rung is None else f"rung {rung} does not do"
        strides = ", ".join(f"{name} {meta.strides}" for name, meta in {**problem.arrays, **results}.items())
        raise NotImplementedError(f"{self.op}: {refusal} {problem} with strides {strides} on {device.name}")


OPERATIONS: dict[str, list[Operation]] = {}  # forward first


def _own_plan(family: Family, call: Call, lengths: Sequence[str]) -> Plan:
    """Return the plan of the call that a family was made of."""
    plan = family.plan(call.sizes(lengths), lambda: call)
    assert plan is not None
    return plan


def _measured(choice: Choice, own: Choice, record: Record) -> str:
    """Return the reason why a measured way is chosen. own: the operator's first way."""
    seconds, first = record.seconds[way_of(choice)], record.seconds[way_of(own)]
    gain = "" if seconds == first else f", where the first way takes {1e6 * first:.1f}"
    return f"{choice.reason}; measured: {1e6 * seconds:.1f} us{gain}"


def _not_compiled(params: Mapping[str, Any], error: NumbaError) -> str:
    """Describe why Numba could not compile a user's function, with the line if Numba names one."""
    report = [line.strip(" :") for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in report if not line.startswith("Failed in")), "")
    for name, value in params.items():
        if isinstance(value, UserFunction):
            code = value.function.__code__
            file = code.co_filename.rpartition("/")[2]
            lines = [line for line in report if line.startswith("File ") and file in line]
            where = lines[-1] if lines else f'File "{code.co_filename}", line {code.co_firstlineno}'
            return f"{name} is {value!r}, expected a function that Numba can compile: {reason} ({where})"
    return reason


def on_host(value: Any, op: str, name: str, dtypes: Sequence[str]) -> Any:
    """Return a host number as a Python number; None and an array on the device unchanged."""
    if value is None or (SIMULATED and isinstance(value, np.ndarray)):
        return value
    device = getattr(value, "device", None)
    method = "__float__" if dtypes[0] in FLOATS else "__index__"
    if hasattr(value, method) and (device is None or str(device) == "cpu"):
        return number_meta(value, op, name, dtypes).pointer
    return value


def _meta_of(layout: Any, adapter: Adapter) -> ArrayMeta:
    """Return the meta of an array, or of a host number, whose layout is its type."""
    if layout in NUMBERS:
        return ArrayMeta((), "int64" if layout is int else "float64", (), "host", 0)
    return adapter.meta_of(layout)


def results_of(out: Any) -> tuple[Any, ...]:
    """Return the arrays of out=, which is one array or several."""
    return out if isinstance(out, tuple) else tuple(out) if isinstance(out, list) else (out,)
