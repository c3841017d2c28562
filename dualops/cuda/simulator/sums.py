"""How tensor cores round what they add up.

To the nearest number, so that what a simulated kernel is off by is its own; or, inside `toward_zero()`, as those of a
GPU do: what is cut off at each product all leans to one side, and of thousands of products in one accumulator is no
longer small. There terms are cut off before they are added, too, a few bits below the largest: a GPU is off by more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_toward_zero = False


@contextmanager
def toward_zero() -> Iterator[None]:
    """Have products round their sums toward zero, inside the with statement."""
    global _toward_zero
    before, _toward_zero = _toward_zero, True
    try:
        yield
    finally:
        _toward_zero = before


def rounded_sums(totals: np.ndarray) -> np.ndarray:
    """float64 totals of a product and what its accumulators were, as the float32 that accumulators become."""
    nearest = totals.astype(np.float32)
    if not _toward_zero:
        return nearest
    beyond = np.abs(nearest) > np.abs(totals)
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)
