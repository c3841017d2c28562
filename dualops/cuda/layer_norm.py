"""layer_norm on the GPU: the public functions. Its kernels are those of `norm`."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from ..spec import layer_norm as SPEC
from .launch.operation import Operation
from .norm import BACKWARD, FORWARD
from .public import Array, Launch


@overload
def layer_norm(
    x: Array,
    w: Array | None = None,
    b: Array | None = None,
    *,
    residual: None = None,
    return_stats: Literal[False] = False,
    eps: float = 1e-5,
    **launch: Unpack[Launch],
) -> Array: ...


@overload
def layer_norm(
    x: Array,
    w: Array | None = None,
    b: Array | None = None,
    *,
    residual: Array,
    return_stats: Literal[False] = False,
    eps: float = 1e-5,
    **launch: Unpack[Launch],
) -> tuple[Array, Array]: ...


@overload
def layer_norm(
    x: Array,
    w: Array | None = None,
    b: Array | None = None,
    *,
    residual: Array | None = None,
    return_stats: Literal[True],
    eps: float = 1e-5,
    **launch: Unpack[Launch],
) -> tuple[Array, ...]: ...


def layer_norm(
    x: Any,
    w: Any = None,
    b: Any = None,
    *,
    eps: float = 1e-5,
    residual: Any = None,
    return_stats: bool = False,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Normalize rows: (h - mean) * rstd * w + b, with h = x + residual and rstd = 1 / sqrt(mean((h - mean)^2) + eps).

    Ba, Kiros & Hinton 2016, arXiv:1607.06450. x [..., N]: a device array of float64, float32, float16 or bfloat16, any
    non-negative strides with a contiguous last axis. residual: of x's shape and dtype. w and b [N]: of x's dtype or
    float32 (float64 for float64); None means 1 and 0. eps: 0 or more.

    Returns y in x's dtype and memory order. With a residual also summed = x + residual, rounded to x's dtype; the rows
    of summed are normalized. With return_stats also mean and rstd [...], float32 (float64 for float64), for
    `layer_norm_backward`. Arithmetic is float32 (float64 for float64). The variance is computed from the differences
    to the mean. A NaN in a row does not affect other rows.
    out: an array for y, or a tuple for all results; y and summed may be x or residual itself. kernel: "naive", "simt"
    or "sm90" instead of the best. stream: a stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call, NotImplementedError if the requested rung does not support it.
    No gradient is recorded: see dualops.torch_bridge.
    """
    return forward((x, w, b, residual), (eps, return_stats), out, kernel, stream)


def layer_norm_backward(
    x: Any,
    mean: Any,
    rstd: Any,
    dy: Any,
    w: Any = None,
    b: Any = None,
    dsummed: Any = None,
    *,
    eps: float = 1e-5,
    return_stats: bool = False,
    w_gradient: bool = True,
    b_gradient: bool = True,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Return the gradient of `layer_norm`: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsummed.

    Summed over all rows, dw = sum(dy * xhat) and db = sum(dy). Here g = dy * w and xhat = (x - mean) * rstd.
    x [..., N]: forward's x, or summed if there was a residual. mean, rstd [...]: as `layer_norm` returned them. dy,
    dsummed: the gradients of y and, if it was used, of summed. b: only its dtype is used. eps, return_stats: not used,
    rstd is enough. w_gradient, b_gradient: whether to compute dw and db.

    Returns dx, which is the residual's gradient too, in x's dtype and memory order. With w and b, on request, also
    dw [N] in w's dtype and db [N] in b's. Bit-equal from run to run on GPUs of the same model: no atomics. Memory in
    addition to the results: a row of partial sums of dw and db, in float32, for each block. out: arrays for all
    results; dx may be x, dy or dsummed itself. kernel, stream and errors are those of `layer_norm`.
    """
    arrays, params = (x, mean, rstd, dy, w, b, dsummed), (eps, return_stats, w_gradient, b_gradient)
    return backward(arrays, params, out, kernel, stream)


forward = Operation(SPEC, rungs=FORWARD, inplace=("x", "residual"))
backward = Operation(SPEC, rungs=BACKWARD, backward=True, inplace=("x", "dy", "dsummed"))
