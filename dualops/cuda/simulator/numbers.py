"""Make NumPy numbers in a third of the time of their types: by writing and reading an element of an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def maker(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts to a NumPy number of this type, and returns numbers of the type unchanged."""
    cell = np.zeros(1, kind)

    def make(value: Any) -> Any:
        if type(value) is kind:
            return value
        cell[0] = value
        return cell[0]

    return make


single, double = maker(np.float32), maker(np.float64)
