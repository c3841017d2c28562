"""Modules in the place of torch's own: the same constructor, parameters and state, and dualops' operators.

They train under FSDP1, FSDP2 and tensor parallelism. torch's SequenceParallel passes on the first argument alone, and
what has a name: there a residual is given by its name.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from .arguments import with_dense_rows
from .layer_norm import layer_norm
from .rms_norm import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with `rms_norm`, and with a residual.

    forward(x, residual=None) normalises x + residual over the last axes, whose shape is `normalized_shape`, and returns
    y, or (y, x + residual). The weight may be wider than x: float32 beside bfloat16. eps of None is that of float32
    (of float64 for float64), as torch has it. Tensors may have any strides: what the operator cannot read where it lies
    is copied, as torch's module does.

    Raises ValueError for an x of another shape, and what `rms_norm` raises.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
        rows, added, weight = flat(self, x, residual, self.weight)
        assert rows is not None
        return shaped(rms_norm(rows, weight, eps=eps, residual=added), x)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` with `layer_norm`, and with a residual.

    forward(x, residual=None) normalises x + residual over the last axes, whose shape is `normalized_shape`, and returns
    y, or (y, x + residual). Weight and bias may be wider than x: float32 beside bfloat16. Tensors may have any strides:
    what the operator cannot read where it lies is copied, as torch's module does.

    Raises ValueError for an x of another shape, and what `layer_norm` raises.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        rows, added, weight, bias = flat(self, x, residual, self.weight, self.bias)
        assert rows is not None
        return shaped(layer_norm(rows, weight, bias, eps=self.eps, residual=added), x)


def flat(module: RMSNorm | LayerNorm, x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """The tensors with their normalised axes as one, contiguous axis. Raises ValueError where x has others."""
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
    """The results with x's axes. FSDP2 warns of a module that returns views: there is none where x has those axes."""
    if isinstance(results, tuple):
        y, summed = results
        return _with_axes_of(x, y), _with_axes_of(x, summed)
    return _with_axes_of(x, results)


def _with_axes_of(x: Tensor, result: Tensor) -> Tensor:
    return result if result.ndim == x.ndim else result.view(x.shape)
