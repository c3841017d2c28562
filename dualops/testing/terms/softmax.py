"""What softmax's gradient cancels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...spec import Problem


def gradient_terms(arrays: Mapping[str, np.ndarray], problem: Problem) -> dict[str, float]:
    """dx = y * (dy - dot): the largest |y| * (|dy| + sum |y * dy|) of a row whose values are finite."""
    y, dy = (np.abs(np.moveaxis(array.astype(np.float64), problem.axis, -1)) for array in arrays.values())
    with np.errstate(over="ignore", invalid="ignore"):
        terms = y * (dy + (y * dy).sum(axis=-1, keepdims=True))
    return {"dx": float(terms[np.isfinite(terms)].max(initial=0.0))}
