"""Modules that replace torch's own: the same constructor, parameters and state, with dualops' operators.

They train under FSDP1, FSDP2 and tensor parallelism. torch's SequenceParallel passes on only the first argument and
keyword arguments: with it, pass a residual by name.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from .arguments import with_dense_rows
from .layer_norm import layer_norm
from .rms_norm import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` computed by `rms_norm`, with an optional residual.

    forward(x, residual=None) normalises x + residual over the last axes, whose shape is `normalized_shape`, and returns
    y, or (y, x + residual). The weight may be wider than x: float32 with bfloat16. The default eps is that of float32
    (of float64 for float64), as in torch. Tensors may have any strides: those that the operator can't read in place are
    copied, as torch's module does.

    Raises ValueError for an x of another shape, and the errors of `rms_norm`.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
        rows, added, weight = flat(self, x, residual, self.weight)
        assert rows is not None
        return shaped(rms_norm(rows, weight, eps=eps, residual=added), x)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` computed by `layer_norm`, with an optional residual.

    forward(x, residual=None) normalises x + residual over the last axes, whose shape is `normalized_shape`, and returns
    y, or (y, x + residual). Weight and bias may be wider than x: float32 with bfloat16. Tensors may have any strides:
    those that the operator can't read in place are copied, as torch's module does.

    Raises ValueError for an x of another shape, and the errors of `layer_norm`.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        rows, added, weight, bias = flat(self, x, residual, self.weight, self.bias)
        assert rows is not None
        return shaped(layer_norm(rows, weight, bias, eps=self.eps, residual=added), x)


def flat(module: RMSNorm | LayerNorm, x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """Return the tensors with their normalised axes as one contiguous axis. Raises ValueError if x has other sizes."""
    axes = tuple(module.normalized_shape)
    if tuple(x.shape[-len(axes) :]) != axes:
        expected = ", ".join(map(str, axes))
        name = type(module).__name__
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected its last axes to be [{expected}]")
    given = (x, *others)
    if len(axes) > 1:
        given = [None if each is None else each.reshape(*each.shape[: -len(axes)], prod(axes)) for each in given]
    return [None if each is None else with_dense_rows(each) for each in given]


def shaped(results: Tensor | tuple[Tensor, Tensor], x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Return the results with x's axes. FSDP2 warns of modules that return views, so none is made if the axes match."""
    if isinstance(results, tuple):
        y, summed = results
        return _with_axes_of(x, y), _with_axes_of(x, summed)
    return _with_axes_of(x, results)


def _with_axes_of(x: Tensor, result: Tensor) -> Tensor:
    return result if result.ndim == x.ndim else result.view(x.shape)
