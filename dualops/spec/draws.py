"""Random sizes of axes, for the random problems of all operators. See `Spec.draw`."""

from __future__ import annotations

from typing import Any

import numpy as np

Shapes = dict[str, tuple[int, ...]]
Drawn = tuple[Shapes, dict[str, Any]]  # shapes and parameters


def random_size(rng: np.random.Generator, limit: int) -> int:
    """Draw a size up to `limit`, often 0, 1, a prime, or a power of two or its neighbour."""
    kind = rng.random()
    if limit < 2 or kind < 0.1:
        size = 1
    elif kind < 0.13:
        size = 0
    elif kind < 0.5:
        size = (1 << int(rng.integers(1, limit.bit_length() + 1))) + int(rng.integers(-1, 2))
    elif kind < 0.7:
        size = _prime_below(int(rng.integers(2, limit + 1)))
    else:  # uniform over the magnitudes
        size = int(np.exp(rng.uniform(0.0, np.log(limit))))
    return min(size, limit)


def _prime_below(limit: int) -> int:
    return next((n for n in range(limit, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1))), 2)
