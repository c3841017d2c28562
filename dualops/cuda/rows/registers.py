"""Rows that are read once and kept in registers until they are written.

    1  a row is shared by `row_threads` threads of a block; a thread loads `vectors` times 16 bytes
    2  the operator reduces them: threads of a warp by shuffles, warps of a row by a barrier and shared memory
    3  the operator writes them

Milakov & Gimelshein 2018, arXiv:1805.02867, section 3.1. Registers: vectors * 16 / itemsize numbers per thread and
input, and about 30 more. Shared memory: 4 numbers per warp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel
from ..launch.arrays import cdiv
from ..launch.step import Step
from ..row_walk import row_axes
from ..tile.storage import access, storage
from .exchange import in_block
from .operator import Keeping, Kind, Starts, argument_types, inputs_of


@dataclass(frozen=True)
class RowsConfig:
    """A block has `row_threads * rows` threads, a multiple of 32."""

    row_threads: int  # threads of one block that share a row: a power of two
    vectors: int  # loads per thread
    rows: int  # rows of a block at once
    aligned: bool = True  # whether rows begin at multiples of 16 bytes and have whole 16-byte vectors
    min_blocks: int = 1  # blocks for which an SM must have registers

    @cached_property
    def threads(self) -> int:
        return self.row_threads * self.rows

    def columns(self, dtype: str) -> int:
        """Return the length of the longest row."""
        return self.row_threads * self.vectors * (storage(dtype).vector if self.aligned else 1)


# for unaligned rows, the first that can hold a row: one element per load, so more loads per thread
UNALIGNED = tuple(RowsConfig(*shape, aligned=False) for shape in ((32, 4, 4), (32, 16, 4), (128, 16, 1), (512, 16, 1)))


@builds
def build(config: RowsConfig, kind: Any) -> Kernel:
    """Return the kernel (arrays, params, rows) of a `Kind`."""
    vec, axes = access(kind.dtype, config.aligned), row_axes(kind.rank)
    group = in_block(storage(kind.dtype).number, config.row_threads, config.rows)
    op = kind.operator(Keeping(group, config.row_threads, config.vectors, config.aligned))
    inputs = inputs_of(kind, op, config.vectors, config.aligned)
    STEP = config.row_threads * vec.vector  # columns between a thread's accesses

    @kernel(*argument_types(kind), threads=config.threads, min_blocks=config.min_blocks, name=kind.named("rows"))
    def rows_in_registers(arrays, params, rows):
        sent, own = group.smem(), op.smem(params)
        tid = cuda.threadIdx.x
        column = tid % config.row_threads * vec.vector
        row = i64(cuda.blockIdx.x) * config.rows + tid // config.row_threads
        mine, left = row < rows.M, i32(rows.N - column)  # left: columns from my first column on
        frag, other = inputs.fragments()
        here, n = axes.place(), i64(column)
        axes.locate(here, row, rows.sizes)
        y_row, summed_row = axes.start(here, arrays.y) + n, axes.start(here, arrays.summed) + n
        starts = Starts(axes.start(here, arrays.x) + n, axes.start(here, arrays.other) + n)
        for j in range(config.vectors):
            keep = mine & (left > j * STEP)
            inputs.load(frag, other, j, arrays, starts, j * STEP, keep)
        inputs.add(frag, other)
        if op.ADDS:
            for j in range(config.vectors):
                vec.store(arrays.summed.data, summed_row + j * STEP, mine & (left > j * STEP), frag, j * vec.vector)
        found = op.keep(frag, other, sent, left, own, rows.N)
        for j in range(config.vectors):
            inside = left > j * STEP
            op.write_kept(frag, j * vec.vector, other, found, own, n + j * STEP, inside)
            vec.store(arrays.y.data, y_row + j * STEP, mine & inside, frag, j * vec.vector)
        if mine & (column == 0):
            op.end(found, own, here)

    return rows_in_registers


def steps_of(config: RowsConfig, kind: Kind, arguments: tuple[Any, ...]) -> list[Step]:
    """Return the launch for arguments (arrays, params, rows)."""
    return [Step(build(config, kind), (cdiv(arguments[2].M, config.rows),), arguments)]
