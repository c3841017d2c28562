"""Every SIM case of every operator: each rung, each direction, threads forward and reversed."""

from __future__ import annotations

import pytest

from dualops.spec import OPERATORS, Tag
from tests.checks import WAYS, check
from tests.cuda.operators import cases_on_rungs


@pytest.mark.parametrize(("direction", "rung", "case"), cases_on_rungs(Tag.SIM))
def test_case(direction, rung, case, order):
    ways = WAYS if order == "forward" else ("given",)
    check(direction.spec, case, direction.function(rung), backward=direction.backward, ways=ways)


def test_every_operator_has_cases_for_every_rung_and_direction():
    made = {(param.values[0].name, param.values[1]) for param in cases_on_rungs(Tag.SIM)}
    expected = {(spec.name, rung) for spec in OPERATORS.values() for rung in spec.rungs}
    expected |= {
        (f"{spec.name}_backward", rung) for spec in OPERATORS.values() if spec.gradients for rung in spec.rungs
    }
    assert made == expected
