"""Which part of a result is held against the reference, where the whole would take minutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

SAMPLED_ELEMENTS = 2**21

Shapes = Mapping[str, tuple[int, ...]]
Selection = dict[str, Any]  # name of an array -> an index of it
Sample = Callable[[Shapes, np.random.Generator], Selection]


def rows(shapes: Shapes, rng: np.random.Generator) -> Selection:
    """Whole rows, the first and the last among them: every array has one row for each index of axis 0."""
    shape = next(iter(shapes.values()))
    count = min(shape[0], max(8, SAMPLED_ELEMENTS // int(np.prod(shape[1:]))))
    return dict.fromkeys(shapes, np.union1d(rng.choice(shape[0], count, replace=False), [0, shape[0] - 1]))


def one_head(shapes: Shapes, rng: np.random.Generator) -> Selection:
    """One key head of one sequence with the query heads that read it; arrays are [B, H or Hkv, ...]."""
    key_heads = shapes["k"][1]
    b, head = int(rng.integers(shapes["k"][0])), int(rng.integers(key_heads))
    picked = {}
    for name, shape in shapes.items():
        group = shape[1] // key_heads
        picked[name] = (slice(b, b + 1), slice(head * group, (head + 1) * group))
    return picked
