"""A call of rms_norm or layer_norm: the variant of its kernels, and their arguments."""

from __future__ import annotations

from collections.abc import Mapping

from ...spec import ArrayMeta, Problem
from ...spec.meta import compute_dtype, contiguous_strides
from ..launch.step import Argument
from ..row_walk import walk
from ..rows.operator import RowArrays, Rows
from ..tile.storage import storage
from .variant import STATISTICS, GradientInputs, Params, Variant

VECTORS = ("w", "b", "dw", "db")


class Call:
    """A problem with its results. args: (arrays, params, rows); backward: (inputs, rows, offset)."""

    def __init__(self, problem: Problem, results: Mapping[str, ArrayMeta], *, backward: bool):
        # backward does not read b
        arrays = {name: meta for name, meta in problem.arrays.items() if not (backward and name == "b")}
        metas = {**results, **arrays}
        self.M, self.N, self.dtype = problem.M, problem.N, problem.dtype
        self.device = problem.arrays["x"].device
        self.sums_dtypes = [results[name].dtype if name in results else None for name in ("dw", "db")]
        walked = walk({name: meta for name, meta in metas.items() if name not in VECTORS}, STATISTICS)
        self.variant = Variant(
            dtype=self.dtype,
            centred=problem.spec.name == "layer_norm",
            rank=walked.rank,
            w=arrays["w"].dtype if "w" in arrays else None,
            b=arrays["b"].dtype if "b" in arrays else None,
            added=("dsummed" if backward else "residual") in arrays,
            statistics="rstd" in results,
            dw="dw" in results,
            db="db" in results,
            backward=backward,
        )
        self.aligned = self._aligned(metas, [walked.rows[name].strides for name in walked.rows.keys() - STATISTICS])
        offset = problem.params.get("offset", 0.0)
        rows = Rows(self.M, self.N, walked.sizes)
        if backward:
            self.dx = walked.of("dx")[0]
            inputs = GradientInputs(*walked.of("x", "mean", "rstd", "dy", "dsummed"), w="w")
            self.args: tuple[Argument, ...] = (inputs, rows, offset)
        else:
            params = Params(*walked.of("mean", "rstd"), w="w", b="b", eps=problem.eps, offset=offset)
            self.args = (RowArrays(*walked.of("y", "summed", "x", "residual")), params, rows)

    def _aligned(self, metas: Mapping[str, ArrayMeta], strides: list[tuple[int, ...]]) -> bool:
        """Return whether every row begins at a multiple of 16 bytes and has whole 16-byte vectors."""
        vector = storage(self.dtype).vector
        return (
            self.N % vector == 0
            and all(step % vector == 0 for steps in strides for step in steps)
            and all(meta.pointer % 16 == 0 for name, meta in metas.items() if name not in STATISTICS)
        )

    def partials_args(self, slots: int) -> tuple[Argument, ...]:
        """Return the arguments of a kernel that writes dx, and sums for dw and db to `slots` slots."""
        return (self.dx, "partials", *self.args, slots)

    def numbers(self, *shape: int) -> ArrayMeta:
        """Return the metadata of an array in the dtype of arithmetic."""
        return ArrayMeta(shape, compute_dtype(self.dtype), contiguous_strides(shape), self.device, 0)
