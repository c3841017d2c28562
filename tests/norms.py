"""What rms_norm and layer_norm bring to fuzzer and checker: domains and special values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dualops.spec import Case
from tests.sizes import random_size

Shapes = dict[str, tuple[int, ...]]
Domain = Callable[[np.random.Generator, int], tuple[Shapes, dict[str, Any]]]


# --- domain --------------------------------------------------------------------------------------


def rms_problem(rng: np.random.Generator, max_elements: int) -> tuple[Shapes, dict[str, Any]]:
    """Shapes and parameters of rms_norm."""
    shapes = _rows(rng, max_elements, ("w",))
    offset = float(rng.choice([0.0, 1.0, -0.5])) if "w" in shapes else 0.0
    return shapes, {"offset": offset, "return_rstd": bool(rng.integers(2)), "eps": _eps(rng)}


def layer_problem(rng: np.random.Generator, max_elements: int) -> tuple[Shapes, dict[str, Any]]:
    """Shapes and parameters of layer_norm."""
    return _rows(rng, max_elements, ("w", "b")), {"return_stats": bool(rng.integers(2)), "eps": _eps(rng)}


def _rows(rng: np.random.Generator, max_elements: int, vectors: tuple[str, ...]) -> Shapes:
    N = random_size(rng, max_elements)
    left, outer = max_elements // max(N, 1), []
    for _ in range(int(rng.integers(0, 4))):
        outer.append(random_size(rng, max(left, 1)))
        left //= max(outer[-1], 1)
    shape = (*(outer[place] for place in rng.permutation(len(outer))), N)
    shapes: Shapes = {"x": shape} | {name: (N,) for name in vectors if rng.random() < 0.7}
    return shapes | ({"residual": shape} if rng.random() < 0.4 else {})


def _eps(rng: np.random.Generator) -> float:
    """Not 0, with which a row's variance of 0 in one order of addition, and of nearly 0 in another, are far apart."""
    return float(rng.choice([1e-6, 1e-5, 1e-3, 1.0]))


def special_limits(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """Squares of a row must have a sum, and what is finite in the truth must be so in half precision."""
    if name in ("x", "residual"):
        return {"float16": 16376.0, "float64": 2.0**500}.get(case.dtype, 2.0**55), True
    # y is at most sqrt(N) * w; a row of tiny numbers has rstd = 1000, and with it goes dx; an infinity times a number
    # that vanishes in float32 alone is a NaN
    half = 8.0 if backward else 256.0
    return {"float16": half, "float64": 2.0**400}.get(case.dtype, 2.0**50), False
