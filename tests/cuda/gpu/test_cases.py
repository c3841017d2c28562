"""Every TEST and SIM case of every operator on every rung, with torch tensors and with Numba device arrays."""

from __future__ import annotations

import os
from itertools import chain
from math import prod

import pytest

from dualops.spec import OPERATORS, Tag
from tests.checks import check
from tests.cuda.fuzz import goes_in_place, trials
from tests.cuda.gpu.library import NUMBA, TORCH
from tests.cuda.gpu.warm import Job, warm
from tests.cuda.kinds import others
from tests.cuda.operators import GENERAL_RUNGS, cases_on_rungs, every_direction, shapes_of
from tests.problems import Layout

CASES = [*cases_on_rungs(Tag.TEST), *cases_on_rungs(Tag.SIM)]
HOST = {entry.name for spec in OPERATORS.values() for entry in spec.inputs if entry.host}
MAX_ELEMENTS = 1 << 15
PROBLEMS_OF_A_KIND = 20  # a kernel of attention is built for its widths and options, which takes seconds


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
    layouts = {name: _odd(len(shape)) for name, shape in shapes_of(direction, case).items()}
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
        assert rung not in GENERAL_RUNGS


def _odd(rank: int) -> Layout:
    return Layout(tuple(range(rank)), (0,) * rank, misalignment=1)


@pytest.mark.parametrize(
    ("direction", "rung", "case"),
    [
        param
        for param in cases_on_rungs(Tag.SIM)
        if param.values[2].dtype == "float32" and HOST & param.values[2].shapes.keys()
    ],
)
def test_numbers_on_the_host(direction, rung, case):
    """A seed that is a Python integer gives what the same seed on the device gives."""
    check(direction.spec, case, direction.function(rung), backward=direction.backward, library=TORCH, host=True)


# Numba has no bfloat16, and wraps no empty array of another library
@pytest.mark.parametrize(
    ("direction", "rung", "case"),
    [p for p in CASES if p.values[2].dtype != "bfloat16" and all(map(prod, p.values[2].shapes.values()))],
)
def test_case_with_numba_device_arrays(direction, rung, case):
    check(direction.spec, case, direction.function(rung), backward=direction.backward, library=NUMBA)


@every_direction
def test_random_problems(direction):
    """DUALOPS_FUZZ of them for each direction (250 unless told)."""
    wanted = int(os.environ.get("DUALOPS_FUZZ", "250"))
    spec = direction.spec
    attention = "flash_attention" in (spec.name, spec.parent)
    drawn = list(trials(direction, 30, 2 * wanted // PROBLEMS_OF_A_KIND + 1 if attention else 2 * wanted, MAX_ELEMENTS))
    warm(Job(spec.name, direction.backward, trial.rung, trial.case) for trial in drawn)
    problems = chain.from_iterable(others(kind, PROBLEMS_OF_A_KIND) for kind in drawn) if attention else iter(drawn)
    ran = refused = 0
    for trial in problems:
        done = trial.run(TORCH)
        ran, refused = ran + done, refused + (not done)
        if ran >= wanted:
            break
    assert ran > 3 * refused
    print(f"{direction.name}: {ran} random problems")
