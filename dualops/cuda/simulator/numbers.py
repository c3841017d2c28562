"""NumPy's numbers, made in a third of the time that their types take: a cell of an array is written, and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def maker(kind: Any) -> Callable[[Any], Any]:
    """What makes numbers of this type as a call of it does, and gives back those that are of it."""
    cell = np.zeros(1, kind)

    def make(value: Any) -> Any:
        if type(value) is kind:
            return value
        cell[0] = value
        return cell[0]

    return make


single, double = maker(np.float32), maker(np.float64)
