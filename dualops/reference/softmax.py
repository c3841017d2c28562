"""softmax in NumPy: the plain form, the online form of Milakov & Gimelshein (arXiv:1805.02867), and the gradient.

Shapes below are those after the axis has been moved to the end: x [..., N].
"""

from __future__ import annotations

import numpy as np

from ..spec import softmax as SPEC
from ._rounding import bound, rows_last


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """exp(x) / sum(exp(x)) along `axis`, with the row's maximum subtracted first.

    x: any shape, float64, float32, float16 or bfloat16 (ml_dtypes). Returns y of x's shape and dtype. Arithmetic is
    float32 (float64 for float64), y is rounded once. A row with a NaN or +inf is NaN; so is a row of only -inf.
    Raises ValueError for an axis out of range, TypeError for another dtype.
    """
    axis = bound(SPEC, {"x": x, "axis": axis})[0].axis
    rows = rows_last(x, axis)  # [..., N]
    if rows.size == 0:
        return np.empty_like(x)
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = rows - rows.max(axis=-1, keepdims=True)  # [..., N], at most 0
        numerator = np.exp(shifted)  # [..., N]
        y = numerator / numerator.sum(axis=-1, keepdims=True)  # [..., N]
    return np.moveaxis(y, -1, axis).astype(x.dtype)


def softmax_online(x: np.ndarray, axis: int = -1, block: int = 128) -> np.ndarray:
    """softmax in two passes over blocks of a row: one for maximum and sum together, one for the result (Algorithm 3).

    A kernel does this for a row that is too long to keep. The running sum is in units of exp(running maximum), and is
    rescaled whenever that maximum rises.
    """
    axis = bound(SPEC, {"x": x, "axis": axis})[0].axis
    rows = rows_last(x, axis)  # [..., N]
    if rows.size == 0:
        return np.empty_like(x)
    row_max = np.full(rows.shape[:-1], -np.inf, rows.dtype)  # [...]
    row_sum = np.zeros(rows.shape[:-1], rows.dtype)  # [...]
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, rows.shape[-1], block):
            piece = rows[..., start : start + block]  # [..., block]
            new_max = np.maximum(row_max, piece.max(axis=-1))  # [...]
            # while all of a row is -inf, the sum is 0 and needs no rescaling
            rescale = np.where(row_sum == 0, 0, np.exp(row_max - new_max)).astype(rows.dtype)  # [...]
            row_sum = row_sum * rescale + np.exp(piece - new_max[..., None]).sum(axis=-1)  # [...]
            row_sum = np.where(new_max == -np.inf, 0, row_sum).astype(rows.dtype)
            row_max = new_max
        y = np.exp(rows - row_max[..., None]) / row_sum[..., None]  # [..., N]
    return np.moveaxis(y, -1, axis).astype(x.dtype)


def softmax_backward(y: np.ndarray, dy: np.ndarray, axis: int = -1) -> np.ndarray:
    """The gradient of softmax with respect to x, from its result y and the gradient dy of that result.

    y, dy: one shape and dtype. Returns dx of that shape and dtype, rounded once.
    """
    axis = bound(SPEC, {"y": y, "dy": dy, "axis": axis}, backward=True)[0].axis
    y_rows, dy_rows = rows_last(y, axis), rows_last(dy, axis)  # [..., N]
    # dL/dx_i = sum_j dL/dy_j * dy_j/dx_i  with  dy_j/dx_i = y_j * ([i = j] - y_i)
    #         = y_i * (dy_i - sum_j y_j * dy_j)
    with np.errstate(invalid="ignore", over="ignore"):
        dot = (y_rows * dy_rows).sum(axis=-1, keepdims=True)  # [..., 1]
        dx = y_rows * (dy_rows - dot)  # [..., N]
    return np.moveaxis(dx, -1, axis).astype(y.dtype)
