"""Calls on arrays that do not exist: which kernels they need, known without a GPU."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch.device import Device
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.launch.step import Step
from dualops.spec import ArrayMeta, Case
from dualops.spec.base import Role
from dualops.spec.meta import FLOATS, itemsize, number_meta
from tests.cuda.fuzz import Trial, goes_in_place
from tests.cuda.operators import Direction
from tests.problems import GUARD, Layout

Metas = dict[str, ArrayMeta]


class Call(NamedTuple):
    """What the kernels of a call depend on; another process can be handed it."""

    operator: str
    backward: bool
    arrays: Mapping[str, ArrayMeta]
    params: Mapping[str, Any]
    rung: str | None = None  # the best unless it is named
    results: Mapping[str, ArrayMeta] | None = None  # where results go, None for new memory


def steps_of(call: Call, device: Device) -> tuple[Step, ...] | None:
    """The launches of a call on such a GPU; None where the rung does not do it."""
    operation = OPERATIONS[call.operator][call.backward]
    bind = operation.spec.bind_backward if call.backward else operation.spec.bind
    problem = bind(dict(call.arrays), dict(call.params))
    results = dict(call.results or problem.outputs(operation.outputs))
    for choice in operation.choices(problem, results, device):
        if call.rung in (None, choice.rung):
            return tuple(choice.steps())
    return None


def calls_of_case(direction: Direction, rung: str | None, case: Case, odd: bool = False) -> list[Call]:
    """The calls of a case: dense, results in given memory, in new memory and, if that is allowed, in the inputs'.

    odd: every array one element off a multiple of 16 bytes.
    """
    if not odd:
        ways = ["given", "allocated", *(["in place"] if goes_in_place(direction) else [])]
        return [call_of(Trial(direction, case, rung, way=way)) for way in ways]
    shapes = absent_problem(direction.spec, case, direction.backward).arrays
    layouts = {name: odd_layout(len(meta.shape)) for name, meta in shapes.items()}
    out_layout = layouts[direction.inputs[0].name]
    return [
        call_of(Trial(direction, case, rung, layouts, out_layout, way="given")),
        call_of(Trial(direction, case, rung, layouts, way="allocated")),
    ]


def odd_layout(rank: int) -> Layout:
    """Dense, one element off an aligned address."""
    return Layout(tuple(range(rank)), (0,) * rank, misalignment=1)


def call_of(trial: Trial) -> Call:
    """The call of a trial, as `tests.checks.check` makes it."""
    spec, backward, case = trial.direction.spec, trial.direction.backward, trial.case
    absent = absent_problem(spec, case, backward).arrays
    results = absent_problem(spec, case, False).outputs()
    unasked = {f"d{output.name}" for output in spec.outputs if output.name not in results}  # no gradient comes of these
    arrays: Metas = {}
    for entry in trial.direction.inputs:
        if entry.name not in absent or entry.name in unasked:
            continue
        meta = absent[entry.name]
        if trial.narrow and entry.role is Role.WEIGHT:
            meta = meta._replace(dtype=case.dtype)
        if trial.host and entry.host:
            one = 1.0 if entry.dtypes[0] in FLOATS else 1
            arrays[entry.name] = number_meta(one, spec.name, entry.name, entry.dtypes)
        else:
            arrays[entry.name] = _placed(meta, trial.layouts.get(entry.name))
    params = {**case.params, **trial.extra}
    bind = spec.bind_backward if backward else spec.bind
    wanted = bind(dict(arrays), params).outputs(trial.direction.outputs)
    return Call(spec.name, backward, arrays, params, trial.rung, _results(trial, arrays, wanted))


def _results(trial: Trial, arrays: Metas, wanted: Metas) -> Metas | None:
    """Where the results of a trial go."""
    direction = trial.direction
    updates = {} if direction.backward else direction.spec.updates
    if trial.way == "in place":
        likes = {output.name: output.like for output in direction.outputs}
        return {name: arrays[likes[name]] for name in wanted}
    if trial.way == "given":
        layout = trial.out_layout
        fits = {
            name: layout if layout and len(layout.order) == len(meta.shape) else None for name, meta in wanted.items()
        }
        return {name: _placed(meta, fits[name]) for name, meta in wanted.items()}
    return {name: arrays[updates[name]] for name in wanted} if updates else None


def _placed(meta: ArrayMeta, layout: Layout | None) -> ArrayMeta:
    """An array as `Guarded` places it in an aligned buffer."""
    layout = layout or Layout.dense(len(meta.shape))
    address = (GUARD + layout.misalignment) * itemsize(meta.dtype)
    return meta._replace(strides=layout.strides(meta.shape), pointer=address)


def kernels_of(calls: Iterable[Call], device: Device) -> frozenset[tuple[str, int]]:
    """The identities of the kernels that calls need, with their shared memory."""
    steps = (step for call in calls for step in steps_of(call, device) or ())
    return frozenset((step.kernel.identity, step.shared_bytes) for step in steps)
