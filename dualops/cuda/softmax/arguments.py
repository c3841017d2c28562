"""A call of softmax: the layout of its rows, and its kernels' arguments."""

from __future__ import annotations

from collections.abc import Mapping

from ...spec import ArrayMeta, Problem
from ...spec.meta import Strided
from ..launch.arrays import collapse
from ..launch.step import Argument
from ..launch.views import absent
from ..rows.operator import RowArrays, Rows
from ..tile.storage import storage
from .operator import Softmax


class Call:
    """A problem with its results: arrays of one shape, results first, in the order of kernels' arguments."""

    def __init__(self, problem: Problem, results: Mapping[str, ArrayMeta], *, backward: bool):
        self.kind = Softmax(problem.dtype, backward)
        self.M, self.N, self.dtype, axis = problem.M, problem.N, problem.dtype, problem.axis
        self.metas = {**results, **problem.arrays}
        metas = self.metas.values()
        shape = next(iter(metas)).shape
        self.sizes, self.strides = collapse(
            shape[:axis] + shape[axis + 1 :], *(meta.strides[:axis] + meta.strides[axis + 1 :] for meta in metas)
        )
        self.steps = [meta.strides[axis] if self.N > 1 else 1 for meta in metas]  # strides along the axis

    @property
    def contiguous(self) -> bool:
        """Return whether rows are contiguous, with one stride between rows."""
        return len(self.sizes) <= 1 and all(step == 1 for step in self.steps)

    @property
    def aligned(self) -> bool:
        """Return whether contiguous rows are whole 16-byte vectors."""
        vector = storage(self.dtype).vector
        whole = all(value % vector == 0 for value in (self.N, *self.row_strides))
        return whole and all(meta.pointer % 16 == 0 for meta in self.metas.values())

    @property
    def row_strides(self) -> list[int]:
        """Return the stride between contiguous rows, for each array."""
        return [stride[0] if stride else 0 for stride in self.strides]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Return (arrays, params, rows) of contiguous rows."""
        return self._arrays([(stride,) for stride in self.row_strides]), (), Rows(self.M, self.N, (self.M,))

    def strided_arguments(self, axes: int) -> tuple[Argument, ...]:
        """Return (arrays, rows) of rows along `axes` axes: arrays have a stride of elements, too."""
        missing = axes - len(self.sizes)
        strides = zip(self.strides, self.steps, strict=True)
        arrays = self._arrays([(0,) * missing + stride + (step,) for stride, step in strides])
        return arrays, Rows(self.M, self.N, (1,) * missing + self.sizes)

    def _arrays(self, strides: list[tuple[int, ...]]) -> RowArrays:
        y, *inputs = (Strided(name, own) for name, own in zip(self.metas, strides, strict=True))
        none = absent(len(strides[0]))
        return RowArrays(y, none, *inputs, *[none] * (2 - len(inputs)))
