"""What matmul brings to fuzzer and checker: its domain and its special values."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dualops.spec import Case
from dualops.spec.matmul import ACTIVATIONS, PRECISIONS, shapes_of
from tests.sizes import random_size

Shapes = dict[str, tuple[int, ...]]

LONGEST = 400  # rows, columns, terms


def problem(rng: np.random.Generator, max_elements: int) -> tuple[Shapes, dict[str, Any]]:
    """Shapes and parameters: any layouts, batch axes that broadcast in every way, any options together."""
    K = random_size(rng, min(max_elements, LONGEST))
    M, N = (random_size(rng, min(max_elements // max(K, 1), LONGEST)) for _ in range(2))
    if max_elements < M * N:
        M = max_elements // N
    largest = max(M * K, K * N, M * N, 1)
    a, b = _batches(rng, max_elements // largest)
    layout = "".join(rng.choice(["n", "t"], 2))
    shapes, transposes = shapes_of(M, N, K, layout=layout, a=a, b=b, bias=bool(rng.integers(2)))
    params: dict[str, Any] = {**transposes, "return_preactivation": bool(rng.integers(2))}
    if rng.random() < 0.5:
        params["activation"] = str(rng.choice(ACTIVATIONS))
    if rng.random() < 0.25:
        params["precision"] = str(rng.choice(PRECISIONS))  # of float32
    return shapes, params


def _batches(rng: np.random.Generator, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Batch axes of a and b, in half of the draws none, whose common shape has at most so many places."""
    if rng.random() < 0.5:
        return (), ()
    full: list[int] = []
    for _ in range(int(rng.integers(1, 4))):
        full.append(random_size(rng, min(max(most // max(prod(full), 1), 1), 5)))
    shapes = []
    for _ in range(2):
        shape = tuple(1 if rng.random() < 0.3 else size for size in full)
        leading = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
        shapes.append(shape[int(rng.integers(leading + 1)) :])  # axes of one place may be left out
    return shapes[0], shapes[1]


def special_limits(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """The largest special value of an input, and whether it may be infinite: what float32 and float64 have alike.

    No sum that overflows in half precision. No infinity in a gradient: a slope, or a rounded dz, that is tiny in
    float64 and 0 in float32 makes of it an infinity here and a NaN there.
    """
    return 16.0, not backward
