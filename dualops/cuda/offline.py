"""Problems on arrays that do not exist: which kernels they need, and whether these compile, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..spec import OPERATORS, ArrayMeta, Case, Problem, Spec, Tag
from ..spec.base import Input
from ..spec.meta import contiguous_strides
from . import device as devices
from .compile import Report, compile_kernel
from .device import Device
from .launch import OPERATIONS, Operation
from .step import Step


def check_builds(arch: str, part: int = 0, parts: int = 1) -> Iterator[Report]:
    """Compile the COMPILE cases of every operator for `arch`, each kernel once, and report. Needs no GPU.

    Of `parts` processes each does its part.
    """
    for step in steps_to_check(arch, part, parts):
        yield compile_kernel(step.kernel, arch, step.shared_bytes).report


def steps_to_check(arch: str, part: int = 0, parts: int = 1) -> Iterator[Step]:
    """A launch of every kernel of the COMPILE cases, or every `parts`-th of them."""
    seen: set[str] = set()
    for name, spec in OPERATORS.items():
        for case in spec.tagged(Tag.COMPILE):
            for operation in OPERATIONS[name]:
                if operation.backward and not case.backward:
                    continue
                for step in every_step(operation, case, devices.known(arch)):
                    if step.kernel.identity not in seen:
                        if len(seen) % parts == part:
                            yield step
                        seen.add(step.kernel.identity)


def every_step(operation: Operation, case: Case, device: Device) -> Iterator[Step]:
    """The launches that each rung of an operation would make for the shapes of a case."""
    problem = absent_problem(operation.spec, case, operation.backward)
    rungs = set()
    for choice in operation.choices(problem, problem.outputs(operation.outputs), device):
        if choice.rung not in rungs:
            rungs.add(choice.rung)
            yield from choice.steps()


def absent_problem(spec: Spec, case: Case, backward: bool) -> Problem:
    """The problem of a case, on arrays that do not exist."""

    def absent(inputs: Sequence[Input], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ArrayMeta]:
        there = {wanted.name: case.dtype_of(wanted) for wanted in inputs if wanted.name in shapes}
        return {
            name: ArrayMeta(shapes[name], dtype, contiguous_strides(shapes[name]), "cuda:0", 0)
            for name, dtype in there.items()
        }

    arrays = absent(spec.inputs, case.shapes)
    if not backward:
        return spec.bind(arrays, case.params)
    results = {name: meta.shape for name, meta in spec.bind(arrays, {**case.params, **spec.requests}).outputs().items()}
    shapes = {**case.shapes, **results, **{f"d{name}": shape for name, shape in results.items()}}
    return spec.bind_backward(absent(spec.gradient_inputs, shapes), case.params)
