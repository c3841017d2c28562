"""Every TEST and SIM case of every operator on every rung, with torch tensors and with Numba device arrays."""

import os
from math import prod

import pytest

from dualops.cuda.launch import device as devices
from dualops.cuda.launch.arrays import cdiv
from dualops.spec import Tag
from tests.checks import check
from tests.cuda.calls import odd_layout
from tests.cuda.fuzz import goes_in_place
from tests.cuda.gpu.library import NUMBA, TORCH
from tests.cuda.kinds import BATCH, batch
from tests.cuda.operators import cases_on_rungs, every_direction, general_rungs, shapes_of

CASES = [*cases_on_rungs(Tag.TEST), *cases_on_rungs(Tag.SIM)]
PROBLEMS = int(os.environ.get("DUALOPS_FUZZ", "250"))  # random ones, for each direction


@pytest.mark.parametrize(("direction", "rung", "case"), CASES)
def test_case(direction, rung, case):
    check(direction.spec, case, direction.function(rung), backward=direction.backward, library=TORCH)


@pytest.mark.parametrize(("direction", "rung", "case"), cases_on_rungs(Tag.EDGE))
def test_special_values(direction, rung, case):
    check(direction.spec, case, direction.function(rung), backward=direction.backward, library=TORCH, special=True)


@pytest.mark.parametrize(("direction", "rung", "case"), cases_on_rungs(Tag.EDGE))
def test_in_place(direction, rung, case):
    ways = ["in place"] if goes_in_place(direction) else ["given"]
    check(direction.spec, case, direction.function(rung), backward=direction.backward, library=TORCH, ways=ways)


@pytest.mark.parametrize(("direction", "rung", "case"), cases_on_rungs(Tag.EDGE))
def test_rows_at_odd_addresses(direction, rung, case):
    """One element off a multiple of 16 bytes, results too; a rung may say that it does no such rows."""
    layouts = {name: odd_layout(len(shape)) for name, shape in shapes_of(direction, case).items()}
    try:
        check(
            direction.spec,
            case,
            direction.function(rung),
            backward=direction.backward,
            library=TORCH,
            layouts=layouts,
            out_layout=layouts[direction.inputs[0].name],
        )
    except NotImplementedError:
        assert rung not in general_rungs(direction, case, dense=False)


# Numba has no bfloat16, and wraps no empty array of another library
@pytest.mark.parametrize(
    ("direction", "rung", "case"),
    [p for p in CASES if p.values[2].dtype != "bfloat16" and all(map(prod, p.values[2].shapes.values()))],
)
def test_case_with_numba_device_arrays(direction, rung, case):
    check(direction.spec, case, direction.function(rung), backward=direction.backward, library=NUMBA)


@every_direction
@pytest.mark.parametrize("number", range(cdiv(PROBLEMS, BATCH)))
def test_random_problems(direction, number):
    """What planning says is served runs and is right, and nothing else is refused."""
    problems = list(batch(direction, number, devices.current()))
    for trial, served in problems:
        assert trial.run(TORCH) == served, trial
    assert any(served for _, served in problems)
