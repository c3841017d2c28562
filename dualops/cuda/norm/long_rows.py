"""Norms of rows too long to be kept: each is read again for every sum, and once more to be written.

Forward, a block a row: sum(h) for layer_norm, the sum of (h - mean)^2, then y. What one reading brings in, the next
finds in L2 as a rule. Backward:

    1  a block a row: level = sum(g) / N, along = sum(g * xhat) / N              (norm_long_rows_means)
    2  a block takes `columns` of many rows, one after another: dx = rstd * (g - level - xhat * along) + dsummed,
       dw += dy * xhat, db += dy                                                 (norm_long_rows_backward)
    3  the blocks' dw and db are summed by a third kernel (sums.py)

Names and papers as in rows.py. Registers: vectors * 16 / itemsize numbers a thread for each of x, dy, w, dw and db.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, pointer, verb
from ..tile.numbers import numbers
from ..tile.storage import access, storage
from .sums import PIECE, partial_sums
from .variant import Variant, backward_types, forward_types
from .verbs import Columns, meet_block, norm_axes, row_sums, weights


@dataclass(frozen=True)
class LongRowsConfig:
    """A block a row, or a block for `columns` of many rows."""

    threads: int  # a power of two, at least 32
    vectors: int  # independent loads of x that a thread has under way
    aligned: bool = True

    def columns(self, dtype: str) -> int:
        """That a block has at once."""
        return self.threads * self.vectors * (storage(dtype).vector if self.aligned else 1)


@builds
def build_forward(config: LongRowsConfig, variant: Variant) -> Kernel:
    """norm_long_rows(to, given, work)."""
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, axes = numbers(mem.number), norm_axes(variant)
    w_and_b, group = weights(variant, config.aligned), row_sums(mem.number, config.threads, 1)
    COLUMNS = config.columns(variant.dtype)

    @verb
    def read(frag, x, x_row, residual, residual_row, first, N):
        """A thread's part of the columns from `first` on, 0 beyond the row."""
        other = cuda.local.array(config.vectors * vec.vector, mem.number)
        for j in range(config.vectors):
            at = first + j * config.threads * vec.vector
            vec.load(frag, j * vec.vector, x.data, x_row + at, at < N, num.zero)
            if variant.added:
                vec.load(other, j * vec.vector, residual.data, residual_row + at, at < N, num.zero)
        if variant.added:
            for i in range(len(frag)):
                frag[i] = mem.rounded(frag[i] + other[i])

    @kernel(*forward_types(variant), threads=config.threads)
    def norm_long_rows(to, given, work):
        parts = group.smem()
        tid = cuda.threadIdx.x
        place = axes.place()
        frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        other = cuda.local.array(config.vectors * vec.vector, mem.number)
        axes.locate(place, i64(cuda.blockIdx.x), work.sizes)
        x_row, residual_row = axes.start(place, given.x), axes.start(place, given.residual)
        row_mean = num.zero
        if variant.centred:
            total = num.zero
            for first in range(tid * vec.vector, work.N, COLUMNS):
                read(frag, given.x, x_row, given.residual, residual_row, first, work.N)
                piece = num.zero  # added as one, so that a long row's sum keeps its last bits
                for i in range(len(frag)):
                    piece += frag[i]
                total += piece
            row_mean = group.sum(total, i32(0), parts) / mem.number(work.N)
        squares = num.zero
        for first in range(tid * vec.vector, work.N, COLUMNS):
            read(frag, given.x, x_row, given.residual, residual_row, first, work.N)
            piece = num.zero
            for j in range(config.vectors):
                if first + j * config.threads * vec.vector < work.N:
                    for i in range(j * vec.vector, (j + 1) * vec.vector):
                        piece += (frag[i] - row_mean) * (frag[i] - row_mean)
            squares += piece
        squares = group.sum(squares, i32(1), parts)
        row_rstd = num.rsqrt(squares / mem.number(work.N) + work.eps)

        y_row, summed_row = axes.start(place, to.y), axes.start(place, to.summed)
        for first in range(tid * vec.vector, work.N, COLUMNS):
            read(frag, given.x, x_row, given.residual, residual_row, first, work.N)
            for j in range(config.vectors):
                at = first + j * config.threads * vec.vector
                if variant.added:
                    vec.store(to.summed.data, summed_row + at, at < work.N, frag, j * vec.vector)
                for i in range(j * vec.vector, (j + 1) * vec.vector):
                    frag[i] = (frag[i] - row_mean) * row_rstd
                w_and_b.load_w(other, j * vec.vector, given.w, i64(at), at < work.N)
                if variant.w is not None:
                    for i in range(j * vec.vector, (j + 1) * vec.vector):
                        frag[i] *= other[i] + work.offset
                w_and_b.load_b(other, j * vec.vector, given.b, i64(at), at < work.N)
                if variant.b is not None:
                    for i in range(j * vec.vector, (j + 1) * vec.vector):
                        frag[i] += other[i]
                vec.store(to.y.data, y_row + at, at < work.N, frag, j * vec.vector)
        if variant.statistics:  # noqa: SIM102 Numba leaves out what an if on a constant guards
            if tid == 0:
                axes.write_statistics(place, to.mean, to.rstd, row_mean, row_rstd)

    return norm_long_rows


@builds
def build_means(config: LongRowsConfig, variant: Variant) -> Kernel:
    """norm_long_rows_means(means, dx, partials, given, work, slots).

    means [2, M]: level, then along.
    """
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, axes = numbers(mem.number), norm_axes(variant)
    w_and_b, group = weights(variant, config.aligned), row_sums(mem.number, config.threads, 1)
    COLUMNS = config.columns(variant.dtype)

    @kernel(pointer(mem.number), *backward_types(variant), threads=config.threads)
    def norm_long_rows_means(means, dx, partials, given, work, slots):
        parts = group.smem()
        tid = cuda.threadIdx.x
        place = axes.place()
        x_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        dy_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        w_frag = cuda.local.array(vec.vector, mem.number)
        row = i64(cuda.blockIdx.x)
        axes.locate(place, row, work.sizes)
        x_row, dy_row = axes.start(place, given.x), axes.start(place, given.dy)
        row_mean, row_rstd = axes.statistics(place, given.mean, given.rstd)
        level, along = num.zero, num.zero
        for first in range(0, work.N, COLUMNS):
            for j in range(config.vectors):
                at = first + (j * config.threads + tid) * vec.vector
                vec.load(x_frag, j * vec.vector, given.x.data, x_row + at, at < work.N, num.zero)
                vec.load(dy_frag, j * vec.vector, given.dy.data, dy_row + at, at < work.N, num.zero)
            level_piece, along_piece = num.zero, num.zero
            for j in range(config.vectors):
                at = first + (j * config.threads + tid) * vec.vector
                w_and_b.load_w(w_frag, 0, given.w, i64(at), at < work.N)
                for c in range(vec.vector):
                    i = j * vec.vector + c
                    g = dy_frag[i] * (w_frag[c] + work.offset) if variant.w is not None else dy_frag[i]
                    level_piece += g
                    along_piece += g * ((x_frag[i] - row_mean) * row_rstd)
            level += level_piece
            along += along_piece
        level = group.sum(level, i32(0), parts) / mem.number(work.N)
        along = group.sum(along, i32(1), parts) / mem.number(work.N)
        if tid == 0:
            means[row] = level if variant.centred else num.zero
            means[work.M + row] = along

    return norm_long_rows_means


@builds
def build_backward(config: LongRowsConfig, variant: Variant) -> Kernel:
    """norm_long_rows_backward(means, dx, partials, given, work, slots).

    Of every `slots` rows, a block takes those that have its place among them.
    """
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, axes, w_and_b = numbers(mem.number), norm_axes(variant), weights(variant, config.aligned)
    sums = partial_sums(variant, config.threads, config.vectors, 1, config.aligned, meet_block)
    COLUMNS = config.columns(variant.dtype)

    @kernel(pointer(mem.number), *backward_types(variant), threads=config.threads)
    def norm_long_rows_backward(means, dx, partials, given, work, slots):
        table = sums.table(partials, slots, work.N)
        tid = cuda.threadIdx.x
        place = axes.place()
        x_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        dy_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        other = cuda.local.array(config.vectors * vec.vector, mem.number)
        w_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        dw_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        db_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        tiles = (work.N + COLUMNS - 1) // COLUMNS
        begin = cuda.blockIdx.x % tiles * COLUMNS
        slot = i64(cuda.blockIdx.x // tiles)
        for j in range(config.vectors):
            at = begin + (j * config.threads + tid) * vec.vector
            w_and_b.load_w_plus(w_frag, j * vec.vector, given.w, i64(at), at < work.N, work.offset)
        row = slot
        more = False  # than one piece
        while row < work.M:
            for i in range(len(x_frag)):
                dw_frag[i] = num.zero
                db_frag[i] = num.zero
            end = min(row + PIECE * slots, work.M)
            while row < end:
                axes.locate(place, row, work.sizes)
                x_row, dy_row = axes.start(place, given.x), axes.start(place, given.dy)
                dx_row, dsummed_row = axes.start(place, dx), axes.start(place, given.dsummed)
                for j in range(config.vectors):
                    at = begin + (j * config.threads + tid) * vec.vector
                    vec.load(x_frag, j * vec.vector, given.x.data, x_row + at, at < work.N, num.zero)
                    vec.load(dy_frag, j * vec.vector, given.dy.data, dy_row + at, at < work.N, num.zero)
                    if variant.added:
                        vec.load(other, j * vec.vector, given.dsummed.data, dsummed_row + at, at < work.N, num.zero)
                row_mean, row_rstd = axes.statistics(place, given.mean, given.rstd)
                level, along = means[row], means[work.M + row]
                for i in range(len(x_frag)):
                    xhat = (x_frag[i] - row_mean) * row_rstd
                    g = dy_frag[i] * w_frag[i] if variant.w is not None else dy_frag[i]
                    if variant.dw:
                        dw_frag[i] += dy_frag[i] * xhat
                    if variant.db:
                        db_frag[i] += dy_frag[i]
                    x_frag[i] = (g - level - xhat * along) * row_rstd
                    if variant.added:
                        x_frag[i] += other[i]
                for j in range(config.vectors):
                    at = begin + (j * config.threads + tid) * vec.vector
                    vec.store(dx.data, dx_row + at, at < work.N, x_frag, j * vec.vector)
                row += slots
            sums.write(table, slot, Columns(begin, work.N - begin), dw_frag, db_frag, more)
            more = True

    return norm_long_rows_backward
