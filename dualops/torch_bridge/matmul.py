"""matmul for torch tensors. Semantics: `dualops.spec.matmul`; integration with torch: `interop`."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .. import reference
from ..spec import matmul as SPEC
from ..spec.domains import shown
from .interop import register

_operator = register(
    SPEC,
    reference.matmul,
    reference.matmul_backward,
    kinds={"activation": "str?", "precision": "str?"},
    autocast="lower",
)


@overload
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    return_preactivation: Literal[False] = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Tensor | None = None,
    activation: str | None = None,
    precision: str | None = None,
) -> Tensor: ...


@overload
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    return_preactivation: Literal[True],
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Tensor | None = None,
    activation: str | None = None,
    precision: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Tensor | None = None,
    activation: str | None = None,
    precision: str | None = None,
    return_preactivation: bool = False,
) -> Any:
    """act(op(a) @ op(b) + bias), differentiable once by a, b and bias; op transposes the last two axes on request.

    a [..., M, K] ([..., K, M] with transpose_a), b [..., K, N] ([..., N, K] with transpose_b), of one dtype (float64,
    float32, float16, bfloat16) on a CUDA device or the CPU, of any strides; the axes before the last two broadcast.
    bias [N] of that dtype or float32 (float64 for float64). activation: None, "relu", "gelu" (by the error function) or
    "silu". precision: how float32 is multiplied: None (as float32), "tf32" or "3xtf32"; torch's settings have no
    effect. `matmul(x, weight, transpose_b=True, bias=bias)` is torch.nn.functional.linear.

    Returns a new y [..., M, N], row-major, of a's dtype; with return_preactivation also the activation's input. Sums
    are float32 (float64 for float64), and results are rounded once. Backward keeps a, b and, with an activation, the
    preactivation. Gradients have the layouts of a and b, are deterministic, and are computed only if needed. Under
    autocast a and b take autocast's dtype; bias keeps its own or becomes float32.

    Works under torch.compile (fullgraph, dynamic shapes), torch.export and, outside torch.compile, torch.func.grad.
    CUDA tensors run on torch's current stream. CPU tensors use the NumPy reference, which is slow.

    Raises TypeError and ValueError for a wrong call. Raises NotImplementedError for vmap, for a gradient of the
    gradient and for float32 with a precision on a CUDA device that has no tensor cores for it, below 8.0.

    >>> import torch
    >>> matmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [-5.0]]), activation="relu")
    tensor([[0.]])
    """
    if not isinstance(return_preactivation, bool):
        value = shown(return_preactivation)
        raise TypeError(f"{SPEC.name}: return_preactivation is {value}, expected True or False")
    kept = return_preactivation or _needed(activation, a, b, bias)
    results = _operator(a, b, bias, transpose_a, transpose_b, activation, precision, kept)
    return results if return_preactivation else results[0]


def _needed(activation: Any, *inputs: Any) -> bool:
    """Whether backward will need the preactivation."""
    differentiable = (isinstance(x, Tensor) and x.requires_grad for x in inputs)
    return activation is not None and torch.is_grad_enabled() and any(differentiable)
