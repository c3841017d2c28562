"""A call of rms_norm or layer_norm: what kernels for it are built for, and what they are launched with."""

from __future__ import annotations

from collections.abc import Mapping

from ...spec import ArrayMeta, Problem
from ...spec.meta import compute_dtype, contiguous_strides
from ..launch.step import Argument
from ..row_walk import walk
from ..tile.storage import storage
from .variant import STATISTICS, BackwardGiven, BackwardWork, Given, Results, Variant, Work

VECTORS = ("w", "b", "dw", "db")


class Call:
    """A problem with its results."""

    def __init__(self, problem: Problem, results: Mapping[str, ArrayMeta], *, backward: bool):
        # of b, backward wants to know no more than that there is one
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
        sizes = self.M, self.N, walked.sizes
        if backward:
            rows = walked.of("x", "mean", "rstd", "dy", "dsummed")
            self.args: tuple[Argument, ...] = (
                *walked.of("dx"),
                "partials",
                BackwardGiven(*rows, "w"),
                BackwardWork(*sizes, offset),
            )
        else:
            to = Results(*walked.of("y", "summed", "mean", "rstd"))
            given = Given(*walked.of("x", "residual"), "w", "b")
            self.args = (to, given, Work(*sizes, problem.eps, offset))

    def _aligned(self, metas: Mapping[str, ArrayMeta], strides: list[tuple[int, ...]]) -> bool:
        """Whether every row begins at a multiple of 16 bytes and holds whole 16-byte vectors."""
        vector = storage(self.dtype).vector
        return (
            self.N % vector == 0
            and all(step % vector == 0 for steps in strides for step in steps)
            and all(meta.pointer % 16 == 0 for name, meta in metas.items() if name not in STATISTICS)
        )

    def numbers(self, *shape: int) -> ArrayMeta:
        """An array of the type that arithmetic is carried in."""
        return ArrayMeta(shape, compute_dtype(self.dtype), contiguous_strides(shape), self.device, 0)
