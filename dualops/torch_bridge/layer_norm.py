"""layer_norm for torch tensors. Semantics: `dualops.spec.layer_norm`; integration with torch: `interop`."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from .. import reference
from ..spec import layer_norm as SPEC
from .interop import register
from .norms import wanted

# backward needs mean and rstd
_operator = register(
    SPEC, reference.layer_norm, reference.layer_norm_backward, fixed={"return_stats": True}, autocast="float32"
)


@overload
def layer_norm(
    x: Tensor,
    w: Tensor | None = None,
    b: Tensor | None = None,
    *,
    residual: None = None,
    return_stats: Literal[False] = False,
    eps: float = 1e-5,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    w: Tensor | None = None,
    b: Tensor | None = None,
    *,
    residual: Tensor,
    return_stats: Literal[False] = False,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]: ...


@overload
def layer_norm(
    x: Tensor,
    w: Tensor | None = None,
    b: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    return_stats: Literal[True],
    eps: float = 1e-5,
) -> tuple[Tensor, ...]: ...


def layer_norm(
    x: Tensor,
    w: Tensor | None = None,
    b: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    return_stats: bool = False,
) -> Any:
    """(h - mean) * rstd * w + b, with h = x + residual; mean and rstd = 1 / sqrt(variance + eps) are each row's.

    x [..., N] of float64, float32, float16 or bfloat16 on a CUDA device or the CPU, any strides with a contiguous last
    axis; residual of its shape and dtype, None for 0. w and b [N] of x's dtype or float32 (float64 for float64); None
    is 1 and 0. The variance is the mean of (h - mean)^2. eps: 0 or more.

    Returns y of x's shape and dtype, its axes in memory in the order of x's; with a residual also summed = x + residual
    of x's dtype; with return_stats also mean and rstd [...], float32 (float64 for float64). y and summed are
    differentiable once, by x, residual, w and b; mean and rstd are not. Gradients are deterministic; those of w and b
    are computed only if needed. Arithmetic is float32 (float64 for float64); summed is rounded, then y. A row with a
    NaN or an infinity is NaN and does not affect the others. Under autocast float16 and bfloat16 become float32 first,
    and the results stay float32.

    Works under torch.compile (fullgraph, dynamic shapes; another eps compiles again), torch.export and, outside
    torch.compile, torch.func.grad. CUDA tensors run on torch's current stream. CPU tensors use the NumPy reference,
    which is slow.

    Raises ValueError for incompatible arrays, TypeError for dtypes other than those above, NotImplementedError for vmap
    and for a gradient of the gradient.

    >>> import torch
    >>> layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), b=torch.tensor([0.0, 10.0, 0.0]))
    tensor([[-1.2247, 10.0000,  1.2247]])
    """
    return wanted(SPEC.name, _operator(x, w, b, residual, eps), residual, "return_stats", return_stats)
