"""Parameters of a test such that any two values meet, where all combinations would be many times as many."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with few combinations in which each value of a parameter meets each value of another."""
    names = list(values)
    places = [tuple(range(len(values[name]))) for name in names]
    left = {
        pair
        for one, two in combinations(range(len(names)), 2)
        for pair in product([one], places[one], [two], places[two])
    }
    chosen = []
    while left:
        best = max(product(*places), key=lambda row: len(left & pairs(row)))
        left -= pairs(best)
        chosen.append(tuple(values[name][place] for name, place in zip(names, best)))
    return pytest.mark.parametrize(tuple(names), chosen, ids=lambda value: str(value))


def pairs(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """The pairs of (parameter, value) that a combination has."""
    return {(one, row[one], two, row[two]) for one, two in combinations(range(len(row)), 2)}
