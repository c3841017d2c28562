"""softmax for torch tensors. Semantics: `dualops.spec.softmax`; integration with torch: `interop`."""

from __future__ import annotations

from torch import Tensor

from .. import reference
from ..spec import softmax as SPEC
from .interop import register

_operator = register(SPEC, reference.softmax, reference.softmax_backward, autocast="float32")


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along `axis`, differentiable once. Milakov and Gimelshein 2018, arXiv:1805.02867.

    x: a tensor of any shape with at least one axis and of any strides, float64, float32, float16 or bfloat16, on a CUDA
    device or the CPU. axis: from -x.ndim to x.ndim - 1.

    Returns a new tensor of x's shape, dtype and device, its axes in memory in the order of x's. Arithmetic is float32
    (float64 for float64) and the result is rounded once. A row with a NaN or +inf is NaN, and so is a row of only -inf;
    other rows are not affected. Under autocast a float16 or bfloat16 x becomes float32 first, and the result stays
    float32. The gradient has x's dtype and is deterministic.

    Works under torch.compile (fullgraph, dynamic shapes), torch.export, torch.vmap and, outside torch.compile,
    torch.func.grad and jacrev. CUDA tensors run on torch's current stream. CPU tensors use the NumPy reference, which
    is not fast.

    Raises ValueError for an axis out of range and for a tensor without axes. Raises TypeError for anything but a tensor
    of the dtypes above and for an axis that is not an integer. Raises NotImplementedError for a gradient of the
    gradient and, on a CUDA device, for rows with more than three strides in memory. Nothing is copied implicitly:
    `x.contiguous()` has one stride.

    >>> import torch
    >>> softmax(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    return _operator(x, axis)
