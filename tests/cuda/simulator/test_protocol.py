"""The simulator rejects every mutant of the ring kernels' protocol, for the reason that is its mistake."""

import re

import pytest

from dualops.cuda import simulator
from tests.wrong.protocol import DIRECTIONS, MUTANTS, rejection

MADE = [
    (name, direction, cluster)
    for name, mutant in MUTANTS.items()
    for direction in DIRECTIONS
    for cluster in mutant.clusters
]


@pytest.mark.parametrize(("name", "direction", "cluster"), MADE)
def test_rejected(name, direction, cluster):
    reasons = []
    for order in ("forward", "reversed"):
        with simulator.order(order):
            reason = rejection(MUTANTS[name], cluster, direction == "backward")
        if reason and re.search(MUTANTS[name].reason, reason):
            return
        reasons.append(reason or "nothing")
    pytest.fail(f"{name} was not rejected for {MUTANTS[name].reason!r}, but for {reasons}")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cluster", [1, 2])
def test_what_is_right_passes(direction, cluster, order):
    assert rejection(None, cluster, direction == "backward") is None
