"""Shared by rms_norm and layer_norm in NumPy. Rows lie along the last axis: x [..., N]."""

from __future__ import annotations

import numpy as np

from ._rounding import arithmetic


def with_residual(x: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
    """Return x + residual, rounded to x's dtype: a result, and the input of the norm. [..., N]"""
    if residual is None:
        return x
    with np.errstate(invalid="ignore", over="ignore"):
        return (arithmetic(x) + arithmetic(residual)).astype(x.dtype)


def row_mean(rows: np.ndarray) -> np.ndarray:
    """Return the mean of each row; NaN for a row without elements. [...]"""
    return np.asarray(rows.sum(axis=-1) / rows.dtype.type(rows.shape[-1]))


def sum_of_rows(rows: np.ndarray) -> np.ndarray:
    """Return the sum of all rows. NumPy adds in pairs, which rounds less than one row after another. [N]"""
    columns = np.ascontiguousarray(np.moveaxis(rows, -1, 0))  # [N, ...]
    return columns.sum(axis=tuple(range(1, columns.ndim)))
