"""Kernels of problems without arrays: which they are, whether they compile, and building them ahead. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import product

from ...spec import OPERATORS, ArrayMeta, Case, Problem, Spec, Tag
from ...spec.base import Input
from ...spec.meta import contiguous_strides
from ...spec.text import case_of
from ..launch import device as devices
from ..launch.device import Device
from ..launch.operation import OPERATIONS, Choice, Operation
from ..launch.step import Step
from .binaries import Wanted, ahead, build_all
from .compile import Report

OF_LISTS = "table"  # the rung for lists of tensors; for one tensor it is not the best


def warm(*problems: str, arch: str | None = None, jobs: int | None = None, backward: bool = True) -> list[Report]:
    """Compile and keep the kernels of problems, so that no call waits for a compiler. Launches nothing.

    Use it in a machine's image, or before a training run.

        warm("rms_norm x=8192x4096:bfloat16 w=4096", "flash_attention q=2x32x4096x128:bfloat16 ... causal=True")

    problems: texts in the form of `spec.text`; or an operator's name, for the sizes of its benchmarks; or its name and
    a pattern of benchmark cases, "flash_attention:s4096*"; without problems all operators. arch: "sm_90a", ..., for
    each GPU of that architecture; by default the current GPU's. jobs: processes that compile in parallel, by default
    one a core. backward: also the gradient, and a forward that returns what the gradient needs.

    Returns a report for each kernel, first of those that were kept before. Raises ValueError, TypeError and
    NotImplementedError for a problem that can't be read, is wrong, or has no kernel, and OSError if a kernel can't be
    kept: the cache folder can't be written, is full, or belongs to another user.
    """
    places = (devices.current(),) if arch is None else devices.every(arch)
    return list(build_all(to_warm(problems, places, backward=backward), jobs, must_keep=True))


def to_warm(problems: Iterable[str], places: Iterable[Device], *, backward: bool = True) -> list[Wanted]:
    """Return the kernels that `warm` builds, each once for an architecture."""
    cases = [each for text in tuple(problems) or OPERATORS for each in _cases(text)]
    found: dict[Wanted, None] = {}
    for device, (spec, case) in product(places, cases):
        for step in steps_of(spec, case, device, backward=backward and case.backward):
            found[Wanted(step.kernel, device.arch, step.shared_bytes)] = None
    return list(found)


def _cases(text: str) -> list[tuple[Spec, Case]]:
    name, colon, pattern = text.partition(":")
    if name not in OPERATORS:
        return [case_of(text, OPERATORS)]
    spec = OPERATORS[name]
    timed = [*spec.tagged(Tag.BENCH), *(spec.tagged(Tag.COMPARE) if colon else ())]
    found = [(spec, case) for case in timed if not colon or fnmatchcase(case.id, pattern)]
    if not found:
        raise ValueError(f"{name}: no case that is timed is {pattern!r}, it has {', '.join(case.id for case in timed)}")
    return found


def build_gradient_ahead(problem: Problem, device: Device) -> None:
    """Let helpers build the kernels of a forward call's gradient, see `binaries.ahead`. Does not wait.

    Does nothing if that gradient has no kernels: backward raises the error if it is called.
    """
    for operation in OPERATIONS[problem.spec.name][1:]:
        with suppress(TypeError, ValueError, NotImplementedError):
            gradient = gradient_of(problem)
            choice = operation.choose(gradient, gradient.outputs(operation.outputs), device)
            ahead((step.kernel, device.arch, step.shared_bytes) for step in choice.steps())


def to_check(operators: Iterable[str], architectures: Iterable[str]) -> list[Wanted]:
    """Return the kernels of operators' COMPILE cases, each once for each architecture."""
    steps = ((arch, step) for arch in architectures for step in steps_to_check(arch, operators))
    return [Wanted(step.kernel, arch, step.shared_bytes) for arch, step in steps]


def steps_to_check(arch: str, operators: Iterable[str] = tuple(OPERATORS)) -> Iterator[Step]:
    """Yield a launch of every kernel of the COMPILE cases."""
    seen: set[str] = set()
    for name in operators:
        for case in OPERATORS[name].tagged(Tag.COMPILE):
            for operation in OPERATIONS[name]:
                if operation.backward and not case.backward:
                    continue
                for step in every_step(operation, case, devices.known(arch)):
                    if step.kernel.identity not in seen:
                        yield step
                        seen.add(step.kernel.identity)


def every_step(operation: Operation, case: Case, device: Device) -> Iterator[Step]:
    """Yield the launches of each rung of an operation for the shapes of a case."""
    problem = absent_problem(operation.spec, case, operation.backward)
    rungs = set()
    for choice in _choices(operation, problem, device):
        if choice.rung not in rungs:
            rungs.add(choice.rung)
            yield from choice.steps()


def steps_of(spec: Spec, case: Case, device: Device, *, backward: bool = True) -> Iterator[Step]:
    """Yield the launches of calls for the shapes of a case. backward: also the gradient, and the forward before it.

    Raises NotImplementedError if no kernel supports it.
    """
    forward, *gradient = OPERATIONS[spec.name]
    problems = [(forward, absent_problem(spec, case))]
    if backward and gradient:
        training = absent_problem(spec, case, requests=True)
        problems += [(forward, training), (gradient[0], gradient_of(training))]
    for operation, problem in problems:
        choices = list(_choices(operation, problem, device))
        if not choices:
            raise NotImplementedError(f"{operation.op}: no kernel does {problem} on {device.name}")
        yield from operation.choose(problem, problem.outputs(operation.outputs), device).steps()
        for choice in choices[1:]:
            if choice.rung == OF_LISTS:
                yield from choice.steps()


def _choices(operation: Operation, problem: Problem, device: Device) -> Iterable[Choice]:
    return operation.choices(problem, problem.outputs(operation.outputs), device)


def absent_problem(spec: Spec, case: Case, backward: bool = False, *, requests: bool = False) -> Problem:
    """Return the problem of a case, without arrays. requests: with all results that backward needs."""
    arrays = _absent(spec.inputs, case.shapes, case)
    if not backward:
        names = [param.name for param in spec.params]
        params = {name: value for name, value in case.params.items() if name in names}
        return spec.bind(arrays, {**params, **(spec.requests if requests else {})})
    results = {name: meta.shape for name, meta in spec.bind(arrays, {**case.params, **spec.requests}).outputs().items()}
    shapes = {**case.shapes, **results, **{f"d{name}": shape for name, shape in results.items()}}
    return spec.bind_backward(_absent(spec.gradient_inputs, shapes, case), case.params)


def _absent(inputs: Sequence[Input], shapes: Mapping[str, tuple[int, ...]], case: Case) -> dict[str, ArrayMeta]:
    there = {wanted.name: case.dtype_of(wanted) for wanted in inputs if wanted.name in shapes}
    return {
        name: ArrayMeta(shapes[name], dtype, _strides(shapes[name], case.orders.get(name)), "cuda:0", 0)
        for name, dtype in there.items()
    }


def _strides(shape: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the strides of a dense array whose axes have this order in memory, slowest first."""
    if order is None:
        return contiguous_strides(shape)
    by_axis = dict(zip(order, contiguous_strides([shape[axis] for axis in order]), strict=True))
    return tuple(by_axis[axis] for axis in range(len(shape)))


def gradient_of(problem: Problem) -> Problem:
    """Return the problem of a forward call's gradient.

    It has the gradients of results that are returned without a request, and the required ones.
    """
    spec, results = problem.spec, problem.outputs()
    known = {**problem.arrays, **results}
    known |= {name: results[result] for name, result in spec.saved_instead.items() if result in results}
    when = spec.saved_when
    kept = {name: known[name] for name in spec.saved if name in known and (name not in when or when[name](problem))}
    incoming = {given.name: given for given in spec.gradient_inputs}
    for output in spec.outputs:
        given = incoming.get(f"d{output.name}")
        if given and output.name in results and not (given.optional and spec.request(output)):
            kept[given.name] = results[output.name]
    return spec.bind_backward(kept, problem.params)
