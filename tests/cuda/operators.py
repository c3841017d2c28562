"""What tests of kernels are made for: each direction of each operator, each of its rungs, each case."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest

import dualops.cuda
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch import device as devices
from dualops.cuda.launch.operation import OPERATIONS
from dualops.spec import OPERATORS, Case, Spec, Tag
from dualops.spec.base import Input, Output
from tests.problems import Layout


class Direction(NamedTuple):
    """An operator's forward, or its gradient."""

    spec: Spec
    backward: bool

    @property
    def name(self) -> str:
        return f"{self.spec.name}_backward" if self.backward else self.spec.name

    @property
    def inputs(self) -> tuple[Input, ...]:
        return self.spec.gradient_inputs if self.backward else self.spec.inputs

    @property
    def outputs(self) -> tuple[Output, ...]:
        return self.spec.gradients if self.backward else self.spec.outputs

    def function(self, rung: str | None = None) -> Callable[..., Any]:
        """The public function of dualops.cuda, held to one rung if it is named."""
        public = getattr(dualops.cuda, self.name)
        return public if rung is None else partial(public, kernel=rung)


DIRECTIONS = [
    Direction(spec, backward)
    for spec in OPERATORS.values()
    for backward in (False, True)
    if not backward or spec.backward_cost is not None
]
every_direction = pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda direction: direction.name)


GENERAL_RUNGS = ("naive", "simt")
FORWARD_ALONE = {("retention_backward", "sm90")}  # rungs without a gradient


@cache
def cases_on_rungs(tag: Tag) -> list[Any]:
    """(direction, rung, case) for every case with this tag and every rung that does it."""
    return [
        pytest.param(direction, rung, case, id=f"{direction.name}-{rung}-{case.id}")
        for direction in DIRECTIONS
        for case in direction.spec.tagged(tag)
        if case.backward or not direction.backward
        for rung in rungs_of(direction, case)
    ]


def rungs_of(direction: Direction, case: Case) -> list[str]:
    """The rungs that do a case whose arrays are dense, the general ones whatever they say."""
    general = general_rungs(direction, case)
    spec, device = direction.spec, devices.current()
    problem = absent_problem(spec, case, direction.backward)
    outputs = problem.outputs(direction.outputs)
    operation = OPERATIONS[spec.name][direction.backward]
    served = {choice.rung for choice in operation.choices(problem, outputs, device)}
    return [rung for rung in spec.rungs if rung in served or rung in general]


def kernels_of(direction: Direction, rung: str | None, case: Case) -> set[str]:
    """The identities of the kernels that do a case, dense, on a rung; None: on the best one."""
    problem = absent_problem(direction.spec, case, direction.backward)
    operation = OPERATIONS[direction.spec.name][direction.backward]
    choices = operation.choices(problem, problem.outputs(operation.outputs), devices.current())
    choice = next((each for each in choices if rung in (None, each.rung)), None)
    return {step.kernel.identity for step in choice.steps()} if choice else set()


def general_rungs(direction: Direction, case: Case, dense: bool = True) -> tuple[str, ...]:
    """The rungs that must do a case; the others say by NotImplementedError which problems they do not.

    Those are all of GENERAL_RUNGS, but in a precision of tensor cores none, and without naive where a softmax's rows
    are not contiguous, as they may be if arrays are not dense, and for the gradient of log_decay.
    """
    if case.params.get("precision") is not None:
        return ()
    rows_apart = direction.spec.name == "softmax" and not (
        dense and case.params.get("axis", -1) in (-1, len(case.shapes["x"]) - 1)
    )
    step_gradient = direction.backward and "log_decay" in case.shapes
    return tuple(rung for rung in GENERAL_RUNGS if rung != "naive" or not (rows_apart or step_gradient))


def shapes_of(direction: Direction, case: Case) -> dict[str, tuple[int, ...]]:
    """The shapes of what a direction takes, by name."""
    problem = absent_problem(direction.spec, case, direction.backward)
    return {name: meta.shape for name, meta in problem.arrays.items()}


def without_broadcast(layout: Layout) -> Layout:
    """The same where every element has a place of its own, as a result must."""
    return Layout(layout.order, layout.gaps, layout.step, frozenset(), layout.misalignment)
