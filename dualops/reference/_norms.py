"""What rms_norm and layer_norm share in NumPy. Rows lie along the last axis: x [..., N]."""

from __future__ import annotations

import numpy as np

from ._rounding import arithmetic


def with_residual(x: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
    """x + residual, rounded to x's dtype: it is a result, and what is normalised. [..., N]"""
    if residual is None:
        return x
    with np.errstate(invalid="ignore", over="ignore"):
        return (arithmetic(x) + arithmetic(residual)).astype(x.dtype)


def row_mean(rows: np.ndarray) -> np.ndarray:
    """The mean of each row; NaN of one without elements. [...]"""
    return np.asarray(rows.sum(axis=-1) / rows.dtype.type(rows.shape[-1]))


def sum_of_rows(rows: np.ndarray) -> np.ndarray:
    """The sum of all rows, in pairs rather than one row after another, which rounds less. [N]"""
    columns = np.ascontiguousarray(np.moveaxis(rows, -1, 0))  # [N, ...]
    return columns.sum(axis=tuple(range(1, columns.ndim)))
