"""rms_norm on the GPU: the public functions. Its kernels are those of `norm`."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from ..spec import rms_norm as SPEC
from .launch.operation import Operation
from .norm import BACKWARD, FORWARD
from .public import Array, Launch


@overload
def rms_norm(
    x: Array,
    w: Array | None = None,
    *,
    residual: None = None,
    return_rstd: Literal[False] = False,
    eps: float = 1e-6,
    offset: float = 0.0,
    **launch: Unpack[Launch],
) -> Array: ...


@overload
def rms_norm(
    x: Array,
    w: Array | None = None,
    *,
    residual: Array,
    return_rstd: Literal[False] = False,
    eps: float = 1e-6,
    offset: float = 0.0,
    **launch: Unpack[Launch],
) -> tuple[Array, Array]: ...


@overload
def rms_norm(
    x: Array,
    w: Array | None = None,
    *,
    residual: Array | None = None,
    return_rstd: Literal[True],
    eps: float = 1e-6,
    offset: float = 0.0,
    **launch: Unpack[Launch],
) -> tuple[Array, ...]: ...


def rms_norm(
    x: Any,
    w: Any = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: Any = None,
    return_rstd: bool = False,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Normalize rows: h * rstd * (w + offset), with h = x + residual and rstd = 1 / sqrt(mean(h^2) + eps).

    Zhang & Sennrich 2019, arXiv:1910.07467. x [..., N]: a device array of float64, float32, float16 or bfloat16, any
    non-negative strides with a contiguous last axis. residual: of x's shape and dtype. w [N]: of x's dtype or float32
    (float64 for float64); None means 1. eps: 0 or more. offset: added to w; 1 if w is stored as its difference from 1.

    Returns y in x's dtype and memory order. With a residual also summed = x + residual, rounded to x's dtype; the rows
    of summed are normalized. With return_rstd also rstd [...], float32 (float64 for float64), for `rms_norm_backward`.
    Arithmetic is float32 (float64 for float64). A NaN in a row does not affect other rows.
    out: an array for y, or a tuple for all results; y and summed may be x or residual itself. kernel: "naive", "simt"
    or "sm90" instead of the best. stream: a stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call, NotImplementedError if the requested rung does not support it.
    No gradient is recorded: see dualops.torch_bridge.
    """
    return forward((x, w, residual), (eps, offset, return_rstd), out, kernel, stream)


def rms_norm_backward(
    x: Any,
    rstd: Any,
    dy: Any,
    w: Any = None,
    dsummed: Any = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    return_rstd: bool = False,
    w_gradient: bool = True,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Return the gradient of `rms_norm`: dx = rstd * (g - xhat * mean(g * xhat)) + dsummed, dw = sum(dy * xhat).

    dw is a sum over rows. Here g = dy * (w + offset) and xhat = x * rstd. x [..., N]: forward's x, or summed if there
    was a residual. rstd [...]: as `rms_norm` returned it. dy, dsummed: the gradients of y and, if it was used, of
    summed. offset: forward's. eps, return_rstd: not used, rstd is enough. w_gradient: whether to compute dw.

    Returns dx, which is the residual's gradient too, in x's dtype and memory order. With w, on request, also dw [N] in
    w's dtype. Bit-equal from run to run on GPUs of the same model: no atomics. Memory in addition to the results: a row
    of partial sums of dw, in float32, for each block. out: arrays for all results; dx may be x, dy or dsummed itself.
    kernel, stream and errors are those of `rms_norm`.
    """
    arrays, params = (x, rstd, dy, w, dsummed), (eps, offset, return_rstd, w_gradient)
    return backward(arrays, params, out, kernel, stream)


forward = Operation(SPEC, rungs=FORWARD, inplace=("x", "residual"))
backward = Operation(SPEC, rungs=BACKWARD, backward=True, inplace=("x", "dy", "dsummed"))
