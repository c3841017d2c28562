"""layer_norm in NumPy, and its gradient. Rows lie along the last axis: x [..., N]."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np

from ..spec import layer_norm as SPEC
from ._norms import row_mean, sum_of_rows, with_residual
from ._rounding import arithmetic, bound, rows_last


@overload
def layer_norm(
    x: np.ndarray,
    w: np.ndarray | None = None,
    b: np.ndarray | None = None,
    *,
    residual: None = None,
    return_stats: Literal[False] = False,
    eps: float = 1e-5,
) -> np.ndarray: ...


@overload
def layer_norm(
    x: np.ndarray,
    w: np.ndarray | None = None,
    b: np.ndarray | None = None,
    *,
    residual: np.ndarray,
    return_stats: Literal[False] = False,
    eps: float = 1e-5,
) -> tuple[np.ndarray, np.ndarray]: ...


@overload
def layer_norm(
    x: np.ndarray,
    w: np.ndarray | None = None,
    b: np.ndarray | None = None,
    *,
    residual: np.ndarray | None = None,
    return_stats: Literal[True],
    eps: float = 1e-5,
) -> tuple[np.ndarray, ...]: ...


def layer_norm(
    x: np.ndarray,
    w: np.ndarray | None = None,
    b: np.ndarray | None = None,
    *,
    eps: float = 1e-5,
    residual: np.ndarray | None = None,
    return_stats: bool = False,
) -> np.ndarray | tuple[np.ndarray, ...]:
    """(h - mean) * rstd * w + b, with h = x + residual; mean and rstd = 1 / sqrt(variance + eps) are each row's.

    x [..., N] of float64, float32, float16 or bfloat16 (ml_dtypes), any strides with a contiguous last axis; residual
    has its shape and dtype. w and b [N] of x's dtype or float32 (float64 for float64); None is 1 and 0. The variance is
    the mean of (h - mean)^2. eps: 0 or more.

    Returns y of x's shape and dtype. With a residual also summed = x + residual, of x's dtype. With return_stats also
    mean and rstd [...], float32 (float64 for float64). Arithmetic is float32 (float64 for float64); summed is rounded,
    then y. A row with a NaN or an infinity is NaN; other rows are not affected.
    Raises TypeError and ValueError for a wrong call.
    """
    problem, _ = bound(SPEC, locals())
    h = with_residual(x, residual)  # [..., N]
    rows = rows_last(h, -1)  # [..., N]
    with np.errstate(all="ignore"):
        mean = row_mean(rows)  # [...]
        centred = rows - mean[..., None]  # [..., N]
        rstd = np.asarray(1 / np.sqrt(row_mean(centred * centred) + problem.eps))  # [...]
        y = centred * rstd[..., None]  # [..., N]
        if w is not None:
            y = y * arithmetic(w)  # [..., N]
        if b is not None:
            y = y + arithmetic(b)  # [..., N]
        y = y.astype(x.dtype)
    results = [y]
    if residual is not None:
        results.append(h)
    if problem.return_stats:
        results += [mean, rstd]
    return y if len(results) == 1 else tuple(results)


def layer_norm_backward(
    x: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    dy: np.ndarray,
    w: np.ndarray | None = None,
    b: np.ndarray | None = None,
    dsummed: np.ndarray | None = None,
    *,
    eps: float = 1e-5,
    return_stats: bool = False,
    w_gradient: bool = True,
    b_gradient: bool = True,
) -> np.ndarray | tuple[np.ndarray, ...]:
    """The gradient of layer_norm.

    x [..., N]: forward's x, or summed if there was a residual. mean and rstd [...]: as forward returned them. dy and
    dsummed: the gradients of y and, if it was used, of summed. b: only its presence and dtype are used, for db.
    w_gradient, b_gradient: whether to return dw and db. eps, return_stats: forward's; not needed beyond rstd.

    Returns dx, which is the residual's gradient too, of x's shape and dtype. With w and b, on request, also dw [N] of
    w's dtype and db [N] of b's dtype, 0 if there are no rows.
    """
    problem, _ = bound(SPEC, locals(), backward=True)
    rows, dy_rows = rows_last(x, -1), rows_last(dy, -1)  # [..., N]
    with np.errstate(all="ignore"):
        xhat = (rows - mean[..., None]) * rstd[..., None]  # [..., N]

        # y_j = xhat_j * w_j + b_j, and the gradient of xhat is g = dy * w
        # dxhat_j/dx_i = rstd * ([i = j] - 1 / N - xhat_i * xhat_j / N)
        # dx_i = sum_j g_j * dxhat_j/dx_i = rstd * (g_i - mean(g) - xhat_i * mean(g * xhat)), and summed is h itself
        g = dy_rows if w is None else dy_rows * arithmetic(w)  # [..., N]
        dx = rstd[..., None] * (g - row_mean(g)[..., None] - xhat * row_mean(g * xhat)[..., None])  # [..., N]
        if dsummed is not None:
            dx = dx + arithmetic(dsummed)
        gradients = [dx.astype(x.dtype)]

        # dw = sum over rows of dy * xhat
        if w is not None and problem.w_gradient:
            gradients.append(sum_of_rows(dy_rows * xhat).astype(w.dtype))  # [N]

        # db = sum over rows of dy
        if b is not None and problem.b_gradient:
            gradients.append(sum_of_rows(dy_rows).astype(b.dtype))  # [N]
    return gradients[0] if len(gradients) == 1 else tuple(gradients)
