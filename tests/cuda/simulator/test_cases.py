"""Every SIM case and every kernel of every operator, on each rung: threads forward and reversed in turns."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dualops.spec import Tag
from tests.checks import check
from tests.cuda.operators import GENERAL_RUNGS, cases_on_rungs, kernels_of

ORDERS = ("forward", "reversed")
BOXES = "sim_boxes"  # as long as boxes are wide: kernels that read by elements have the same dtype in shorter cases


def in_orders(params: list[Any]) -> Iterator[Any]:
    """Threads forward and reversed in turns of each rung and dtype, of bfloat16 the other way round: kernels meet in
    the same places in many cases.

    Left out are cases that come in another dtype and whose kernels come in another case.
    """
    turns, seen = Counter[Any](), set[Any]()
    for param in params:
        direction, rung, case = param.values
        if case.name == BOXES and rung in GENERAL_RUNGS:
            continue
        has = {(direction.name, rung, case.name), *kernels_of(direction, rung, case)}
        if has <= seen:
            continue
        seen |= has
        turn = direction.name, rung, case.dtype
        turns[turn] += 1
        order = ORDERS[(turns[turn] + (case.dtype == "bfloat16")) % 2]
        yield pytest.param(order, *param.values, id=f"{order}-{param.id}")


@pytest.mark.parametrize(
    ("order", "direction", "rung", "case"), list(in_orders(cases_on_rungs(Tag.SIM))), indirect=["order"]
)
def test_case(direction, rung, case, order):
    """Seeds are arrays in the one order and Python integers in the other; so are weights wide, and narrow."""
    one, run = order == "forward", direction.function(rung)
    ways = ("given",) if one else ("allocated",)  # both in either order would take minutes more
    check(direction.spec, case, run, backward=direction.backward, ways=ways, host=not one, narrow=not one)
