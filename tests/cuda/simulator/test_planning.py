"""What is known of a call before it is made: the kernels that it needs, its layouts and all."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from dualops.cuda.launch import device as devices, plans
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.launch.sizes import concrete
from dualops.cuda.launch.step import Step
from tests.checks import Rejected
from tests.cuda.calls import call_of, steps_of
from tests.cuda.fuzz import trials
from tests.cuda.operators import every_direction


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The kernels of calls, which do nothing."""
    found: list[tuple[str, int]] = []

    class Launcher:
        def __init__(self, step: Step, *_: Any):
            found.append((step.kernel.identity, concrete(step.shared_bytes)))

        def numbers(self) -> tuple[tuple[int, ...], list[Any]]:
            return (), []

        def __call__(self, grid: tuple[int, ...], args: list[Any]) -> Any:
            return lambda arrays: None

    monkeypatch.setattr(plans, "launcher", Launcher)
    return found


@every_direction
def test_the_kernels_of_random_problems(direction, prepared):
    operation = OPERATIONS[direction.spec.name][direction.backward]
    refused = 0
    for trial in trials(direction, 50, 30, 400):
        prepared.clear()
        operation.forget()
        steps = steps_of(call_of(trial), devices.current())
        with suppress(Rejected):  # nothing was computed
            served = trial.run()
            assert served == (steps is not None)
        refused += steps is None
        assert prepared == [(step.kernel.identity, step.shared_bytes) for step in steps or ()], trial
    operation.forget()
    assert refused < 10


def test_a_callback_gets_a_call_before_its_kernels_are_built(prepared):
    operation, seen = OPERATIONS["softmax"][0], []

    def before(settled):
        seen.append((settled.problem.arrays["x"].shape, len(prepared)))

    operation.forget()
    for rows in (40, 40, 50):  # the second has its plan, the third its kernels
        operation.find((np.ones((rows, 64), np.float32),), (-1,), before=before)
    operation.forget()
    assert seen == [((40, 64), 0)] and len(prepared) == 1
