"""Lion's random problems, and its results as loops over numbers that know nothing of NumPy's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dualops.spec import Case
from dualops.spec.lion import LISTS
from tests.sizes import random_size

HALVES = ("float16", "bfloat16")


def problem(rng: np.random.Generator, max_elements: int) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Any shape, with a master in a third of the draws."""
    shape, left = [], max_elements
    for _ in range(int(rng.integers(1, 5))):
        shape.append(random_size(rng, left))
        left = max(left // max(shape[-1], 1), 1)
    shape = [shape[axis] for axis in rng.permutation(len(shape))]
    names = LISTS if rng.random() < 1 / 3 else LISTS[:3]
    params: dict[str, Any] = {}
    if rng.random() < 0.7:
        params["weight_decay"] = float(rng.choice([0.0, 0.01, 0.1, 1.0]))
    if rng.random() < 0.5:
        params["betas"] = tuple(float(beta) for beta in rng.choice([0.0, 0.5, 0.9, 0.95, 0.999, 1.0], 2))
    return {**dict.fromkeys(names, tuple(shape)), "lr": ()}, params


def special_limits(name: str, case: Case, backward: bool, largest: float) -> tuple[float, bool] | None:
    """A master is no larger than its params can be; lr is a number of its own."""
    return None if name == "lr" else (largest, True)


def step(
    p: float, g: float, m: float, lr: float, betas: Sequence[float], weight_decay: float, number: Any
) -> tuple[float, float]:
    """What a parameter and its momentum become, in Python's floats rounded to `number` after each operation."""

    def rounded(x: float) -> float:
        return float(number(x))

    beta1, beta2 = map(rounded, betas)
    rest1, rest2 = (rounded(1 - beta) for beta in betas)
    lr, weight_decay = rounded(lr), rounded(weight_decay)
    c = rounded(rounded(beta1 * m) + rounded(rest1 * g))
    sign = 1.0 if c > 0 else -1.0 if c < 0 else c if c != c else 0.0
    kept = rounded(1.0 - rounded(lr * weight_decay))
    p = rounded(rounded(p * kept) - rounded(lr * sign))
    return p, rounded(rounded(beta2 * m) + rounded(rest2 * g))
