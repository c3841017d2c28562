"""Rows that are too long to be kept: one block per row reads it twice.

    1  every thread loops over its share of the row, chunk after chunk, and the operator reduces the chunks
    2  the block merges the results of its warps                                     (shuffles, one barrier)
    3  the block reads the row again, usually from L2, and the operator writes it

Milakov & Gimelshein 2018, arXiv:1805.02867, Algorithm 3. Registers: vectors * 16 / itemsize numbers per thread and
input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, verb
from ..launch.step import Step
from ..row_walk import row_axes
from ..tile.storage import access, storage
from .exchange import in_block
from .operator import Keeping, Kind, Starts, argument_types, inputs_of


@dataclass(frozen=True)
class LongRowsConfig:
    """One block per row."""

    threads: int  # a power of two, at least 32
    vectors: int  # independent loads of x in flight per thread
    aligned: bool = True

    def columns(self, dtype: str) -> int:
        """Return the columns that a block has at once."""
        return self.threads * self.vectors * (storage(dtype).vector if self.aligned else 1)


@builds
def build(config: LongRowsConfig, kind: Any) -> Kernel:
    """Return the kernel (arrays, params, rows) of a `Kind`."""
    vec, axes = access(kind.dtype, config.aligned), row_axes(kind.rank)
    group = in_block(storage(kind.dtype).number, config.threads, 1)
    op = kind.operator(Keeping(group, config.threads, config.vectors, config.aligned))
    inputs = inputs_of(kind, op, config.vectors, config.aligned)
    STEP, COLUMNS = config.threads * vec.vector, config.columns(kind.dtype)  # columns between a thread's accesses

    @verb
    def read(frag, other, arrays, starts, first, N):
        """Read a thread's part of a chunk, from column `first` on."""
        for j in range(config.vectors):
            at = first + j * STEP
            inputs.load(frag, other, j, arrays, starts, at, at < N)
        inputs.add(frag, other)

    @kernel(*argument_types(kind), threads=config.threads, name=kind.named("long_rows"))
    def long_rows(arrays, params, rows):
        sent, own, place = group.smem(), op.smem(params), axes.place()
        tid = cuda.threadIdx.x
        frag, other = inputs.fragments()
        axes.locate(place, i64(cuda.blockIdx.x), rows.sizes)
        starts = Starts(axes.start(place, arrays.x), axes.start(place, arrays.other))
        op.prepare(own, rows.N, rows.N)
        known = op.none()
        for first in range(tid * vec.vector, rows.N, COLUMNS):
            read(frag, other, arrays, starts, first, rows.N)
            known = op.add(known, frag, other, i32((rows.N - first + STEP - 1) // STEP))
        a, b = op.of_warp(known, own)
        group.send(sent, 0, a, b)
        found = op.merge(sent, group.wait(sent, 0), own, rows.N)

        y_row, summed_row = axes.start(place, arrays.y), axes.start(place, arrays.summed)
        for first in range(tid * vec.vector, rows.N, COLUMNS):
            read(frag, other, arrays, starts, first, rows.N)
            for j in range(config.vectors):
                at, inside = first + j * STEP, first + j * STEP < rows.N
                if op.ADDS:
                    vec.store(arrays.summed.data, summed_row + at, inside, frag, j * vec.vector)
                op.write(frag, j * vec.vector, other, found, own, i64(at), inside)
                vec.store(arrays.y.data, y_row + at, inside, frag, j * vec.vector)
        if tid == 0:
            op.end(found, own, place)

    return long_rows


def steps_of(config: LongRowsConfig, kind: Kind, arguments: tuple[Any, ...]) -> list[Step]:
    """Return the launch for arguments (arrays, params, rows)."""
    return [Step(build(config, kind), (arguments[2].M,), arguments)]
