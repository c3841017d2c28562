"""rms_norm in NumPy, and its gradient. Rows lie along the last axis: x [..., N]."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np

from ..spec import rms_norm as SPEC
from ._norms import row_mean, sum_of_rows, with_residual
from ._rounding import arithmetic, bound, rows_last


@overload
def rms_norm(
    x: np.ndarray,
    w: np.ndarray | None = None,
    *,
    residual: None = None,
    return_rstd: Literal[False] = False,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> np.ndarray: ...


@overload
def rms_norm(
    x: np.ndarray,
    w: np.ndarray | None = None,
    *,
    residual: np.ndarray,
    return_rstd: Literal[False] = False,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]: ...


@overload
def rms_norm(
    x: np.ndarray,
    w: np.ndarray | None = None,
    *,
    residual: np.ndarray | None = None,
    return_rstd: Literal[True],
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[np.ndarray, ...]: ...


def rms_norm(
    x: np.ndarray,
    w: np.ndarray | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: np.ndarray | None = None,
    return_rstd: bool = False,
) -> np.ndarray | tuple[np.ndarray, ...]:
    """h * rstd * (w + offset), with h = x + residual and rstd = 1 / sqrt(mean(h^2) + eps) of each row.

    x [..., N] of float64, float32, float16 or bfloat16 (ml_dtypes), any strides with a contiguous last axis; residual
    has its shape and dtype. w [N] of x's dtype or float32 (float64 for float64); None is 1, without offset. eps: 0 or
    more. offset: added to w; 1 if w is stored as its difference from 1.

    Returns y of x's shape and dtype. With a residual also summed = x + residual, of x's dtype. With return_rstd also
    rstd [...], float32 (float64 for float64). Arithmetic is float32 (float64 for float64); summed is rounded, then y. A
    row with a NaN or an infinity contains a NaN; other rows are not affected.
    Raises TypeError and ValueError for a wrong call.
    """
    problem, _ = bound(SPEC, locals())
    h = with_residual(x, residual)  # [..., N]
    rows = rows_last(h, -1)  # [..., N]
    with np.errstate(all="ignore"):
        rstd = np.asarray(1 / np.sqrt(row_mean(rows * rows) + problem.eps))  # [...]
        y = rows * rstd[..., None]  # [..., N]
        if w is not None:
            y = y * (arithmetic(w) + problem.offset)  # [..., N]
        y = y.astype(x.dtype)
    results = [y]
    if residual is not None:
        results.append(h)
    if problem.return_rstd:
        results.append(rstd)
    return y if len(results) == 1 else tuple(results)


def rms_norm_backward(
    x: np.ndarray,
    rstd: np.ndarray,
    dy: np.ndarray,
    w: np.ndarray | None = None,
    dsummed: np.ndarray | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    return_rstd: bool = False,
    w_gradient: bool = True,
) -> np.ndarray | tuple[np.ndarray, ...]:
    """The gradient of rms_norm.

    x [..., N]: forward's x, or summed if there was a residual. rstd [...]: as forward returned it. dy and dsummed: the
    gradients of y and, if it was used, of summed. w_gradient: whether to return dw. eps, return_rstd: forward's; not
    needed beyond rstd.

    Returns dx, which is the residual's gradient too, of x's shape and dtype. With w, on request, also dw [N] of w's
    dtype, 0 if there are no rows.
    """
    problem, _ = bound(SPEC, locals(), backward=True)
    rows, dy_rows = rows_last(x, -1), rows_last(dy, -1)  # [..., N]
    with np.errstate(all="ignore"):
        xhat = rows * rstd[..., None]  # [..., N]

        # y_j = xhat_j * (w_j + offset), and the gradient of xhat is g = dy * (w + offset)
        # dxhat_j/dx_i = rstd * ([i = j] - xhat_i * xhat_j / N)
        # dx_i = sum_j g_j * dxhat_j/dx_i = rstd * (g_i - xhat_i * mean(g * xhat)), and summed is h itself: + dsummed_i
        g = dy_rows if w is None else dy_rows * (arithmetic(w) + problem.offset)  # [..., N]
        dx = rstd[..., None] * (g - xhat * row_mean(g * xhat)[..., None])  # [..., N]
        if dsummed is not None:
            dx = dx + arithmetic(dsummed)
        dx = dx.astype(x.dtype)
        if w is None or not problem.w_gradient:
            return dx

        # dw = sum over rows of dy * xhat
        dw = sum_of_rows(dy_rows * xhat)  # [N]
        return dx, dw.astype(w.dtype)
