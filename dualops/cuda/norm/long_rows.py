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
from math import sqrt

from ...spec.meta import compute_dtype
from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer, verb
from ..tile.numbers import numbers
from ..tile.storage import access, storage
from .sums import PIECE, partial_sums
from .variant import Variant, backward_types, forward_types
from .verbs import meet_block, row_axes, row_sums, weights


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
    """norm_long_rows(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset)."""
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, num_mem = numbers(mem.number), storage(compute_dtype(variant.dtype))
    w_vec = weights(variant.dtype, variant.w, config.aligned)
    b_vec = weights(variant.dtype, variant.b, config.aligned)
    axes, group = row_axes(variant.rank), row_sums(mem.number, config.threads, 1)
    VECTOR, VECTORS, THREADS = vec.vector, config.vectors, config.threads
    ELEMENTS, COLUMNS, PARTS, RANK = VECTOR * VECTORS, config.columns(variant.dtype), group.size, variant.rank
    CENTRED, ADDED, STATISTICS = variant.centred, variant.added, variant.statistics
    HAS_W, HAS_B = variant.w is not None, variant.b is not None

    @verb
    def read(frag, other, x, x_row, residual, residual_row, first, N):
        """A thread's part of the columns from `first` on, 0 beyond the row."""
        for j in range(VECTORS):
            at = first + j * THREADS * VECTOR
            vec.load(frag, j * VECTOR, x, x_row + at, at < N, num.zero)
            if ADDED:
                vec.load(other, j * VECTOR, residual, residual_row + at, at < N, num.zero)
        if ADDED:
            for i in range(ELEMENTS):
                frag[i] = mem.rounded(frag[i] + other[i])

    @kernel(*forward_types(variant), threads=config.threads)
    def norm_long_rows(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset):
        parts = cuda.shared.array(PARTS, mem.number)
        tid = cuda.threadIdx.x
        place = cuda.local.array(RANK, i64)
        frag = cuda.local.array(ELEMENTS, mem.number)
        other = cuda.local.array(ELEMENTS, mem.number)
        axes.locate(place, i64(cuda.blockIdx.x), sizes)
        x_row, residual_row = axes.start(place, x.strides), axes.start(place, residual.strides)
        row_mean = num.zero
        if CENTRED:
            total = num.zero
            for first in range(tid * VECTOR, N, COLUMNS):
                read(frag, other, x.data, x_row, residual.data, residual_row, first, N)
                piece = num.zero  # added as one, so that a long row's sum keeps its last bits
                for i in range(ELEMENTS):
                    piece += frag[i]
                total += piece
            row_mean = group.sum(total, i32(0), parts, tid) / mem.number(N)
        squares = num.zero
        for first in range(tid * VECTOR, N, COLUMNS):
            read(frag, other, x.data, x_row, residual.data, residual_row, first, N)
            piece = num.zero
            for j in range(VECTORS):
                if first + j * THREADS * VECTOR < N:
                    for i in range(j * VECTOR, (j + 1) * VECTOR):
                        piece += (frag[i] - row_mean) * (frag[i] - row_mean)
            squares += piece
        squares = group.sum(squares, i32(1), parts, tid)
        row_rstd = num.one / mem.number(sqrt(squares / mem.number(N) + eps))

        y_row, summed_row = axes.start(place, y.strides), axes.start(place, summed.strides)
        for first in range(tid * VECTOR, N, COLUMNS):
            read(frag, other, x.data, x_row, residual.data, residual_row, first, N)
            for j in range(VECTORS):
                at = first + j * THREADS * VECTOR
                if ADDED:
                    vec.store(summed.data, summed_row + at, at < N, frag, j * VECTOR)
                for i in range(j * VECTOR, (j + 1) * VECTOR):
                    frag[i] = (frag[i] - row_mean) * row_rstd
                if HAS_W:
                    w_vec.load(other, j * VECTOR, w, i64(at), at < N)
                    for i in range(j * VECTOR, (j + 1) * VECTOR):
                        frag[i] *= other[i] + offset
                if HAS_B:
                    b_vec.load(other, j * VECTOR, b, i64(at), at < N)
                    for i in range(j * VECTOR, (j + 1) * VECTOR):
                        frag[i] += other[i]
                vec.store(y.data, y_row + at, at < N, frag, j * VECTOR)
        if STATISTICS:  # noqa: SIM102 Numba leaves out what an if on a constant guards
            if tid == 0:
                num_mem.store(rstd.data, axes.start(place, rstd.strides), row_rstd)
                if CENTRED:
                    num_mem.store(mean.data, axes.start(place, mean.strides), row_mean)

    return norm_long_rows


@builds
def build_means(config: LongRowsConfig, variant: Variant) -> Kernel:
    """norm_long_rows_means(means, dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots).

    means [2, M]: level, then along.
    """
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, num_mem = numbers(mem.number), storage(compute_dtype(variant.dtype))
    w_vec, axes = weights(variant.dtype, variant.w, config.aligned), row_axes(variant.rank)
    group = row_sums(mem.number, config.threads, 1)
    VECTOR, VECTORS, THREADS = vec.vector, config.vectors, config.threads
    ELEMENTS, COLUMNS, PARTS, RANK = VECTOR * VECTORS, config.columns(variant.dtype), group.size, variant.rank
    CENTRED, HAS_W = variant.centred, variant.w is not None

    @kernel(pointer(mem.number), *backward_types(variant), threads=config.threads)
    def norm_long_rows_means(means, dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots):
        parts = cuda.shared.array(PARTS, mem.number)
        tid = cuda.threadIdx.x
        place = cuda.local.array(RANK, i64)
        x_frag = cuda.local.array(ELEMENTS, mem.number)
        dy_frag = cuda.local.array(ELEMENTS, mem.number)
        w_frag = cuda.local.array(VECTOR, mem.number)
        row = i64(cuda.blockIdx.x)
        axes.locate(place, row, sizes)
        x_row, dy_row = axes.start(place, x.strides), axes.start(place, dy.strides)
        row_mean, row_rstd = num.zero, num_mem.load(rstd.data, axes.start(place, rstd.strides))
        if CENTRED:
            row_mean = num_mem.load(mean.data, axes.start(place, mean.strides))
        level, along = num.zero, num.zero
        for first in range(0, N, COLUMNS):
            for j in range(VECTORS):
                at = first + (j * THREADS + tid) * VECTOR
                vec.load(x_frag, j * VECTOR, x.data, x_row + at, at < N, num.zero)
                vec.load(dy_frag, j * VECTOR, dy.data, dy_row + at, at < N, num.zero)
            level_piece, along_piece = num.zero, num.zero
            for j in range(VECTORS):
                at = first + (j * THREADS + tid) * VECTOR
                if HAS_W:
                    w_vec.load(w_frag, 0, w, i64(at), at < N)
                for c in range(VECTOR):
                    i = j * VECTOR + c
                    g = dy_frag[i] * (w_frag[c] + offset) if HAS_W else dy_frag[i]
                    level_piece += g
                    along_piece += g * ((x_frag[i] - row_mean) * row_rstd)
            level += level_piece
            along += along_piece
        level = group.sum(level, i32(0), parts, tid) / mem.number(N)
        along = group.sum(along, i32(1), parts, tid) / mem.number(N)
        if tid == 0:
            means[row] = level if CENTRED else num.zero
            means[M + row] = along

    return norm_long_rows_means


@builds
def build_backward(config: LongRowsConfig, variant: Variant) -> Kernel:
    """norm_long_rows_backward(means, dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots).

    Of every `slots` rows, a block takes those that have its place among them.
    """
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, num_mem = numbers(mem.number), storage(compute_dtype(variant.dtype))
    w_vec, axes = weights(variant.dtype, variant.w, config.aligned), row_axes(variant.rank)
    VECTOR, VECTORS, THREADS = vec.vector, config.vectors, config.threads
    sums = partial_sums(variant.dtype, THREADS, VECTORS, 1, config.aligned, variant.sums, meet_block)
    ELEMENTS, COLUMNS, SHARED, RANK = VECTOR * VECTORS, config.columns(variant.dtype), sums.size, variant.rank
    CENTRED, ADDED, HAS_W, DW, DB = variant.centred, variant.added, variant.w is not None, variant.dw, variant.db
    DB_FIRST = variant.sums - 1

    @kernel(pointer(mem.number), *backward_types(variant), threads=config.threads)
    def norm_long_rows_backward(means, dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots):
        shared = cuda.shared.array(SHARED, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        place = cuda.local.array(RANK, i64)
        x_frag = cuda.local.array(ELEMENTS, mem.number)
        dy_frag = cuda.local.array(ELEMENTS, mem.number)
        other = cuda.local.array(ELEMENTS, mem.number)
        w_frag = cuda.local.array(ELEMENTS, mem.number)
        dw_frag = cuda.local.array(ELEMENTS, mem.number)
        db_frag = cuda.local.array(ELEMENTS, mem.number)
        tiles = (N + COLUMNS - 1) // COLUMNS
        begin = cuda.blockIdx.x % tiles * COLUMNS
        slot = i64(cuda.blockIdx.x // tiles)
        for j in range(VECTORS):
            at = begin + (j * THREADS + tid) * VECTOR
            if HAS_W:
                w_vec.load(w_frag, j * VECTOR, w, i64(at), at < N)
                for i in range(j * VECTOR, (j + 1) * VECTOR):
                    w_frag[i] += offset
        row = slot
        more = False  # than one piece
        while row < M:
            for i in range(ELEMENTS):
                dw_frag[i] = num.zero
                db_frag[i] = num.zero
            end = min(row + PIECE * slots, M)
            while row < end:
                axes.locate(place, row, sizes)
                x_row, dy_row = axes.start(place, x.strides), axes.start(place, dy.strides)
                dx_row, dsummed_row = axes.start(place, dx.strides), axes.start(place, dsummed.strides)
                for j in range(VECTORS):
                    at = begin + (j * THREADS + tid) * VECTOR
                    vec.load(x_frag, j * VECTOR, x.data, x_row + at, at < N, num.zero)
                    vec.load(dy_frag, j * VECTOR, dy.data, dy_row + at, at < N, num.zero)
                    if ADDED:
                        vec.load(other, j * VECTOR, dsummed.data, dsummed_row + at, at < N, num.zero)
                row_mean, row_rstd = num.zero, num_mem.load(rstd.data, axes.start(place, rstd.strides))
                if CENTRED:
                    row_mean = num_mem.load(mean.data, axes.start(place, mean.strides))
                level, along = means[row], means[M + row]
                for i in range(ELEMENTS):
                    xhat = (x_frag[i] - row_mean) * row_rstd
                    g = dy_frag[i] * w_frag[i] if HAS_W else dy_frag[i]
                    if DW:
                        dw_frag[i] += dy_frag[i] * xhat
                    if DB:
                        db_frag[i] += dy_frag[i]
                    x_frag[i] = (g - level - xhat * along) * row_rstd
                    if ADDED:
                        x_frag[i] += other[i]
                for j in range(VECTORS):
                    at = begin + (j * THREADS + tid) * VECTOR
                    vec.store(dx.data, dx_row + at, at < N, x_frag, j * VECTOR)
                row += slots
            if DW:
                sums.write(partials, slot, N, begin, N - begin, dw_frag, shared, tid, more)
            if DB:
                sums.write(partials, DB_FIRST * slots + slot, N, begin, N - begin, db_frag, shared, tid, more)
            more = True

    return norm_long_rows_backward
