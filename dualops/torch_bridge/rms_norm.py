"""rms_norm for torch tensors. Semantics: `dualops.spec.rms_norm`; integration with torch: `interop`."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from .. import reference
from ..spec import rms_norm as SPEC
from .interop import register
from .norms import wanted

# backward needs rstd
_operator = register(
    SPEC, reference.rms_norm, reference.rms_norm_backward, fixed={"return_rstd": True}, autocast="float32"
)


@overload
def rms_norm(
    x: Tensor,
    w: Tensor | None = None,
    *,
    residual: None = None,
    return_rstd: Literal[False] = False,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    w: Tensor | None = None,
    *,
    residual: Tensor,
    return_rstd: Literal[False] = False,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]: ...


@overload
def rms_norm(
    x: Tensor,
    w: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    return_rstd: Literal[True],
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, ...]: ...


def rms_norm(
    x: Tensor,
    w: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: Tensor | None = None,
    return_rstd: bool = False,
) -> Any:
    """h * rstd * (w + offset), with h = x + residual and rstd = 1 / sqrt(mean(h^2) + eps) of each row.
    Zhang and Sennrich 2019, arXiv:1910.07467.

    x [..., N] of float64, float32, float16 or bfloat16 on a CUDA device or the CPU, any strides with a contiguous last
    axis; residual of its shape and dtype, None for 0. w [N] of x's dtype or float32 (float64 for float64); None is 1,
    without offset. eps: 0 or more. offset: added to w; 1 if w is stored as its difference from 1.

    Returns y of x's shape and dtype, its axes in memory in the order of x's; with a residual also summed = x + residual
    of x's dtype; with return_rstd also rstd [...], float32 (float64 for float64). y and summed are differentiable once,
    by x, residual and w; rstd is not. Gradients are deterministic; that of w is computed only if needed. Arithmetic is
    float32 (float64 for float64); summed is rounded, then y. A row with a NaN or an infinity does not affect the
    others. Under autocast float16 and bfloat16 become float32 first, and the results stay float32.

    Works under torch.compile (fullgraph, dynamic shapes; another eps or offset compiles again), torch.export and,
    outside torch.compile, torch.func.grad. CUDA tensors run on torch's current stream. CPU tensors use the NumPy
    reference, which is slow.

    Raises ValueError for incompatible arrays and for an offset without w, and TypeError for dtypes other than those
    above. Raises NotImplementedError for vmap and for a gradient of the gradient.

    >>> import torch
    >>> rms_norm(torch.tensor([[3.0, -4.0], [0.5, 0.5]]), torch.tensor([0.0, 1.0]), offset=1.0)
    tensor([[ 0.8485, -2.2627],
            [ 1.0000,  2.0000]])
    """
    return wanted(SPEC.name, _operator(x, w, residual, eps, offset), residual, "return_rstd", return_rstd)
