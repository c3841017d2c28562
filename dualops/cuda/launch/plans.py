"""Plans: a call's launches, prepared to run again with other pointers.

A `Family` is built from one call whose sizes are traced (`sizes`): the spec binds it, and a kernel is chosen, compiled
and loaded. The family serves every call of other sizes that leads to the same kernels. For each it creates a `Plan`:
grids, arguments, and the layouts of results and workspaces. Nothing here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import take_turns
from ..compiler.backend import SIMULATED
from ..compiler.binaries import ahead
from .arrays import Adapter
from .device import Device
from .driver import away, handle_of
from .sizes import Trace, concrete
from .step import Step, launcher
from .tensor_map import Mapped, Maps


class Choice(NamedTuple):
    """One way to compute a problem: the rung, its Config, the reason for its rank, and the launches."""

    rung: str
    config: Any
    reason: str
    steps: Callable[[], Sequence[Step]]
    workspace: Mapping[str, ArrayMeta] = {}  # arrays that live from the first launch to the last
    shared_bytes: int = 0  # shared memory that an SM must have for the blocks of a kernel that should run at once
    maps: Mapping[str, Mapped] = {}  # tensor maps, by their names in launches


Choices = Callable[[Problem, Mapping[str, ArrayMeta], Device], Iterable[Choice]]


class Call(NamedTuple):
    """A call described by its arrays' metadata: no values, and only the alignment of addresses."""

    arrays: Mapping[str, ArrayMeta]  # the arrays of the call, by name
    out: tuple[ArrayMeta, ...] | None  # the caller's arrays for the results
    params: Mapping[str, Any]
    rung: str | None

    def traced(self, trace: Trace, lengths: Sequence[str]) -> Call:
        """Return the call with sizes that record what is computed from them. lengths: parameters that are sizes."""

        def of(meta: ArrayMeta) -> ArrayMeta:
            shape, strides = (tuple(map(trace.size, numbers)) for numbers in (meta.shape, meta.strides))
            return meta._replace(shape=shape, strides=strides)

        arrays = {name: of(meta) for name, meta in self.arrays.items()}
        out = None if self.out is None else tuple(map(of, self.out))
        traced_lengths = {name: trace.size(self.params[name]) for name in lengths}
        return self._replace(arrays=arrays, out=out, params={**self.params, **traced_lengths})

    def sizes(self, lengths: Sequence[str]) -> list[int]:
        """Return the numbers of `traced` sizes."""
        metas = (*self.arrays.values(), *(self.out or ()))
        return [*chain.from_iterable((*m.shape, *m.strides) for m in metas), *(self.params[name] for name in lengths)]


def sizes_of(layouts: Iterable[Any]) -> tuple[list[int], tuple[Hashable, ...]]:
    """Return shapes and strides, in which plans of one family may differ, and the rest of `Adapter.layouts`."""
    sizes: list[int] = []
    kinds: list[Hashable] = []
    for layout in layouts:
        if type(layout) is tuple:
            shape = layout[0]
            sizes += shape
            sizes += layout[1]
            kinds.append(len(shape))
            layout = layout[2:]
        kinds.append(layout)
    return sizes, tuple(kinds)


class Settled(NamedTuple):
    """How a call is computed: the problem, the arrays to write, the choice and the GPU."""

    problem: Problem
    results: Mapping[str, ArrayMeta]
    choice: Choice
    device: Device


def room(meta: ArrayMeta) -> str:
    """Return the dtype that a workspace is allocated with.

    On a GPU only kernels read it, and not every array library has bfloat16; the simulator uses the arrays' own dtypes.
    """
    return "float16" if meta.dtype == "bfloat16" and not SIMULATED else meta.dtype


class Family:
    """Calls that differ only in sizes and use the same kernels in the same way."""

    def __init__(
        self,
        op: str,
        call: Call,
        lengths: Sequence[str],
        names: Sequence[str],
        same_place: frozenset[tuple[str, str]],
        adapter: Adapter,
        settle: Callable[[Call], Settled],
    ):
        """lengths: the call's parameters that are sizes; names: of all inputs that the operator may have; same_place:
        (result, input) that may be the same memory; settle: a function from a Call to its Settled.
        """
        self.op, self.same_place, self.adapter, self.settle = op, same_place, adapter, settle
        trace = Trace()
        problem, results, choice, device = settle(call.traced(trace, lengths))
        self.device_index = device.index
        arrays = [*(name if name in problem.arrays else None for name in names), *results, *choice.workspace]
        places = [*arrays, *choice.maps]
        with away(device.index) or nullcontext():
            steps = choice.steps()
            ahead((step.kernel, device.arch, concrete(step.shared_bytes)) for step in steps[1:])
            self.launchers = [launcher(step, places, device) for step in steps]
            launches = [each.numbers() for each in self.launchers]
        allocated = () if call.out is not None else results.values()
        self.make_results = [adapter.allocator(meta.dtype, meta.device) for meta in allocated]
        self.make_workspace = [adapter.allocator(room(meta), meta.device) for meta in choice.workspace.values()]
        layouts = [(meta.shape, meta.strides) for meta in (*allocated, *choice.workspace.values())]
        self.names = arrays
        self._numbers = trace.function((launches, layouts, [*choice.maps.values()]))

    def plan(self, sizes: Sequence[int], call: Callable[[], Call]) -> Plan | None:
        """Return the plan of a call with these sizes, None if it needs another family. call: makes the Call."""
        numbers = self._numbers(sizes)
        return None if numbers is None else Plan(self, call, *numbers)


class Plan:
    """A call ready to run. `problem`, `choice` and `steps` say how it is computed."""

    def __init__(
        self, family: Family, call: Callable[[], Call], launches: list[Any], layouts: list[Any], mapped: list[Mapped]
    ):
        """launches: grid and arguments of each; layouts: shape and strides of the arrays to allocate; mapped: the
        tensor maps.
        """
        self.family, self.call, self.adapter, self.device_index = family, call, family.adapter, family.device_index
        self.notes: Any = None  # facts that callers store about such calls
        self.launches: list[Callable[..., None]] = [
            launcher(*numbers) for launcher, numbers in zip(family.launchers, launches)
        ]
        count = len(family.make_results)
        self.results = list(zip(family.make_results, layouts))
        self.workspace = list(zip(family.make_workspace, layouts[count:]))
        self.maps = Maps(mapped, family.names) if mapped else None

    def run(
        self, arrays: Sequence[Any], pointers: list[Any], given: Sequence[Any] | None = None, stream: Any = None
    ) -> list[Any]:
        """Launch on arrays; None for a missing one. `pointers` are their addresses, and then those of `given`.

        Returns the results, or nothing if the caller's arrays for them are `given`.
        """
        if (elsewhere := away(self.device_index, self.adapter.current_device)) is not None:
            with elsewhere:
                return self.run(arrays, pointers, given, stream)
        if given is not None:
            arrays = (*arrays, *given)
            self.apart.check([pointer for array, pointer in zip(arrays, pointers) if array is not None])
        handle = None if stream is None else stream_of(self.family.op, stream)
        results = [make(*layout) for make, layout in self.results]
        workspace = [make(*layout) for make, layout in self.workspace]
        if SIMULATED:
            everything = [*arrays, *results, *workspace]
            records = self.maps.simulated(everything) if self.maps else []
            for launch in self.launches:
                launch([*everything, *(record.address for record in records)])
            return results
        adapter = self.adapter
        pointers += map(adapter.pointer, results)
        if handle is None:
            handle = adapter.stream(arrays, self.family.op)
        if workspace:
            pointers += map(adapter.pointer, workspace)
            if stream is not None:
                for array in workspace:
                    adapter.used_on(array, handle)
        maps = ()  # the maps must live until everything is launched
        if self.maps is not None:
            maps = self.maps.encoded(pointers)
            pointers += [each.address for each in maps]
        for launch in self.launches:
            launch(pointers, handle)
        return results

    # --- what is not needed to run

    @cached_property
    def _settled(self) -> Settled:
        return self.family.settle(self.call())

    @property
    def problem(self) -> Problem:
        return self._settled.problem

    @property
    def choice(self) -> Choice:
        return self._settled.choice

    @cached_property
    def steps(self) -> Sequence[Step]:
        return self.choice.steps()

    @cached_property
    def apart(self) -> Apart:
        return Apart(self)

    def __repr__(self) -> str:
        lines = [f"{self.problem}", f"rung {self.choice.rung}, {self.choice.config}: {self.choice.reason}"]
        lines += [f"{s.kernel.name}: {s.grid} blocks of {s.kernel.threads} threads" for s in self.steps]
        workspace = self.choice.workspace
        lines += [f"{name} {meta.shape}: {meta.nbytes} bytes of workspace" for name, meta in workspace.items()]
        return "\n".join(lines if self.steps else [*lines, "nothing to launch: the result is empty"])


class Apart:
    """The caller's arrays for a call's results, and the arrays that they must not overlap."""

    def __init__(self, plan: Plan):
        problem, results = plan.problem, plan._settled.results
        self.op, self.updates, self.inputs = plan.family.op, problem.spec.updates, list(problem.arrays)
        self.metas = [*problem.arrays.values(), *results.values()]
        self.names = [*self.inputs, *results]
        self.pairs = list(self._pairs(plan.family.same_place))

    def _pairs(self, same_place: frozenset[tuple[str, str]]) -> Iterator[tuple[int, int, int, int, bool]]:
        """Yield i, j, their bytes, and whether they may be the same memory."""
        nbytes = [meta.nbytes for meta in self.metas]
        for i in range(len(self.inputs), len(self.metas)):
            for j in range(i):
                if self.metas[j].device != "host":
                    same_strides = self.metas[i].strides == self.metas[j].strides
                    yield i, j, nbytes[i], nbytes[j], same_strides and (self.names[i], self.names[j]) in same_place

    def check(self, pointers: Sequence[int]) -> None:
        """Raise ValueError if a result shares memory with another array, but must not."""
        for i, j, my_bytes, their_bytes, same_place_allowed in self.pairs:
            mine, theirs = pointers[i], pointers[j]
            if same_place_allowed and mine == theirs:
                continue
            if mine < theirs + their_bytes and theirs < mine + my_bytes:
                if take_turns(self.metas[i]._replace(pointer=mine), self.metas[j]._replace(pointer=theirs)):
                    continue
                mine, theirs = (self._described(k, pointers) for k in (i, j))
                raise ValueError(f"{self.op}: {mine} overlaps {theirs} in memory, expected memory of its own")

    def _described(self, i: int, pointers: Sequence[int]) -> str:
        """Return an array's name in a message. A result that overwrites its input has the input's name."""
        name = self.names[i]
        source = self.updates.get(name)
        if i < len(self.inputs):
            return name
        return source if source and pointers[i] == pointers[self.names.index(source)] else f"out {name}"


def stream_of(op: str, stream: Any) -> int:
    """Return the handle of a caller's stream; 0 in the simulator, which has only one stream.

    Raises TypeError, with the operator's name, for other objects.
    """
    if SIMULATED and type(stream).__module__.startswith("numba.cuda.simulator"):  # Numba's own stand-in has no handle
        return 0
    try:
        handle = handle_of(stream)
    except TypeError as error:
        raise TypeError(f"{op}: {error}") from None
    return 0 if SIMULATED else handle
