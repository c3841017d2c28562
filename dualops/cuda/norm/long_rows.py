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

from ...spec.meta import compute_dtype
from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer, verb
from ..tile import access, storage
from .sums import PIECE, partial_sums
from .variant import Variant, backward_types, forward_types
from .verbs import inverse_root, meet_block, places, row_sums, weights


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
    kept = storage(variant.dtype)
    number, rounded = kept.number, kept.rounded
    vector, load, store = access(variant.dtype, config.aligned)
    load_w, load_b = (weights(variant.dtype, dtype, config.aligned) for dtype in (variant.w, variant.b))
    store_statistic = storage(compute_dtype(variant.dtype)).store
    (locate, start), rsqrt = places(variant.rank), inverse_root(number)
    sums = row_sums(number, config.threads, 1)
    row_sum, PARTS = sums.sum, sums.size
    VECTOR, VECTORS, THREADS = vector, config.vectors, config.threads
    ELEMENTS, COLUMNS = vector * config.vectors, config.columns(variant.dtype)
    CENTRED, ADDED, STATISTICS = variant.centred, variant.added, variant.statistics
    HAS_W, HAS_B, RANK, ZERO = variant.w is not None, variant.b is not None, variant.rank, number(0)

    @verb
    def read(frag, other, x, x_row, residual, residual_row, first, N):
        """A thread's part of the columns from `first` on, 0 beyond the row."""
        for j in range(VECTORS):
            at = first + j * THREADS * VECTOR
            load(frag, j * VECTOR, x, x_row + at, at < N, ZERO)
            if ADDED:
                load(other, j * VECTOR, residual, residual_row + at, at < N, ZERO)
        if ADDED:
            for i in range(ELEMENTS):
                frag[i] = rounded(frag[i] + other[i])

    @kernel(*forward_types(variant), threads=config.threads)
    def norm_long_rows(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset):
        parts = cuda.shared.array(PARTS, number)
        tid = cuda.threadIdx.x
        place = cuda.local.array(RANK, i64)
        frag = cuda.local.array(ELEMENTS, number)
        other = cuda.local.array(ELEMENTS, number)
        locate(place, i64(cuda.blockIdx.x), sizes)
        x_row, residual_row = start(place, x.strides), start(place, residual.strides)
        row_mean = ZERO
        if CENTRED:
            total = ZERO
            for first in range(tid * VECTOR, N, COLUMNS):
                read(frag, other, x.data, x_row, residual.data, residual_row, first, N)
                piece = ZERO  # added as one, so that a long row's sum keeps its last bits
                for i in range(ELEMENTS):
                    piece += frag[i]
                total += piece
            row_mean = row_sum(total, i32(0), parts, tid) / number(N)
        squares = ZERO
        for first in range(tid * VECTOR, N, COLUMNS):
            read(frag, other, x.data, x_row, residual.data, residual_row, first, N)
            piece = ZERO
            for j in range(VECTORS):
                if first + j * THREADS * VECTOR < N:
                    for i in range(j * VECTOR, (j + 1) * VECTOR):
                        piece += (frag[i] - row_mean) * (frag[i] - row_mean)
            squares += piece
        row_rstd = rsqrt(row_sum(squares, i32(1), parts, tid) / number(N) + eps)

        y_row, summed_row = start(place, y.strides), start(place, summed.strides)
        for first in range(tid * VECTOR, N, COLUMNS):
            read(frag, other, x.data, x_row, residual.data, residual_row, first, N)
            for j in range(VECTORS):
                at = first + j * THREADS * VECTOR
                if ADDED:
                    store(summed.data, summed_row + at, at < N, frag, j * VECTOR)
                for i in range(j * VECTOR, (j + 1) * VECTOR):
                    frag[i] = (frag[i] - row_mean) * row_rstd
                if HAS_W:
                    load_w(other, j * VECTOR, w, i64(at), at < N)
                    for i in range(j * VECTOR, (j + 1) * VECTOR):
                        frag[i] *= other[i] + offset
                if HAS_B:
                    load_b(other, j * VECTOR, b, i64(at), at < N)
                    for i in range(j * VECTOR, (j + 1) * VECTOR):
                        frag[i] += other[i]
                store(y.data, y_row + at, at < N, frag, j * VECTOR)
        if STATISTICS:  # noqa: SIM102 Numba leaves out what an if on a constant guards
            if tid == 0:
                store_statistic(rstd.data, start(place, rstd.strides), row_rstd)
                if CENTRED:
                    store_statistic(mean.data, start(place, mean.strides), row_mean)

    return norm_long_rows


@builds
def build_means(config: LongRowsConfig, variant: Variant) -> Kernel:
    """norm_long_rows_means(means, dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots).

    means [2, M]: level, then along.
    """
    number = storage(variant.dtype).number
    vector, load, _ = access(variant.dtype, config.aligned)
    load_w = weights(variant.dtype, variant.w, config.aligned)
    load_statistic = storage(compute_dtype(variant.dtype)).load
    locate, start = places(variant.rank)
    sums = row_sums(number, config.threads, 1)
    row_sum, PARTS = sums.sum, sums.size
    VECTOR, VECTORS, THREADS = vector, config.vectors, config.threads
    ELEMENTS, COLUMNS = vector * config.vectors, config.columns(variant.dtype)
    CENTRED, HAS_W, RANK, ZERO = variant.centred, variant.w is not None, variant.rank, number(0)

    @kernel(pointer(number), *backward_types(variant), threads=config.threads)
    def norm_long_rows_means(means, dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots):
        parts = cuda.shared.array(PARTS, number)
        tid = cuda.threadIdx.x
        place = cuda.local.array(RANK, i64)
        x_frag = cuda.local.array(ELEMENTS, number)
        dy_frag = cuda.local.array(ELEMENTS, number)
        w_frag = cuda.local.array(VECTOR, number)
        row = i64(cuda.blockIdx.x)
        locate(place, row, sizes)
        x_row, dy_row = start(place, x.strides), start(place, dy.strides)
        row_mean, row_rstd = ZERO, load_statistic(rstd.data, start(place, rstd.strides))
        if CENTRED:
            row_mean = load_statistic(mean.data, start(place, mean.strides))
        level, along = ZERO, ZERO
        for first in range(0, N, COLUMNS):
            for j in range(VECTORS):
                at = first + (j * THREADS + tid) * VECTOR
                load(x_frag, j * VECTOR, x.data, x_row + at, at < N, ZERO)
                load(dy_frag, j * VECTOR, dy.data, dy_row + at, at < N, ZERO)
            level_piece, along_piece = ZERO, ZERO
            for j in range(VECTORS):
                at = first + (j * THREADS + tid) * VECTOR
                if HAS_W:
                    load_w(w_frag, 0, w, i64(at), at < N)
                for c in range(VECTOR):
                    i = j * VECTOR + c
                    g = dy_frag[i] * (w_frag[c] + offset) if HAS_W else dy_frag[i]
                    level_piece += g
                    along_piece += g * ((x_frag[i] - row_mean) * row_rstd)
            level += level_piece
            along += along_piece
        level = row_sum(level, i32(0), parts, tid) / number(N)
        along = row_sum(along, i32(1), parts, tid) / number(N)
        if tid == 0:
            means[row] = level if CENTRED else ZERO
            means[M + row] = along

    return norm_long_rows_means


@builds
def build_backward(config: LongRowsConfig, variant: Variant) -> Kernel:
    """norm_long_rows_backward(means, dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots).

    Of every `slots` rows, a block takes those that have its place among them.
    """
    number = storage(variant.dtype).number
    vector, load, store = access(variant.dtype, config.aligned)
    load_w = weights(variant.dtype, variant.w, config.aligned)
    load_statistic = storage(compute_dtype(variant.dtype)).load
    locate, start = places(variant.rank)
    partial = partial_sums(variant.dtype, config.threads, config.vectors, 1, config.aligned, variant.sums, meet_block)
    write, SHARED = partial.write, partial.size
    VECTOR, VECTORS, THREADS = vector, config.vectors, config.threads
    ELEMENTS, COLUMNS = vector * config.vectors, config.columns(variant.dtype)
    CENTRED, ADDED, HAS_W, DW, DB = variant.centred, variant.added, variant.w is not None, variant.dw, variant.db
    DB_FIRST, RANK, ZERO = variant.sums - 1, variant.rank, number(0)

    @kernel(pointer(number), *backward_types(variant), threads=config.threads)
    def norm_long_rows_backward(means, dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots):
        shared = cuda.shared.array(SHARED, number, alignment=16)
        tid = cuda.threadIdx.x
        place = cuda.local.array(RANK, i64)
        x_frag = cuda.local.array(ELEMENTS, number)
        dy_frag = cuda.local.array(ELEMENTS, number)
        other = cuda.local.array(ELEMENTS, number)
        w_frag = cuda.local.array(ELEMENTS, number)
        dw_frag = cuda.local.array(ELEMENTS, number)
        db_frag = cuda.local.array(ELEMENTS, number)
        tiles = (N + COLUMNS - 1) // COLUMNS
        begin = cuda.blockIdx.x % tiles * COLUMNS
        slot = i64(cuda.blockIdx.x // tiles)
        for j in range(VECTORS):
            at = begin + (j * THREADS + tid) * VECTOR
            if HAS_W:
                load_w(w_frag, j * VECTOR, w, i64(at), at < N)
                for i in range(j * VECTOR, (j + 1) * VECTOR):
                    w_frag[i] += offset
        row = slot
        more = False  # than one piece
        while row < M:
            for i in range(ELEMENTS):
                dw_frag[i] = ZERO
                db_frag[i] = ZERO
            end = min(row + PIECE * slots, M)
            while row < end:
                locate(place, row, sizes)
                x_row, dy_row = start(place, x.strides), start(place, dy.strides)
                dx_row, dsummed_row = start(place, dx.strides), start(place, dsummed.strides)
                for j in range(VECTORS):
                    at = begin + (j * THREADS + tid) * VECTOR
                    load(x_frag, j * VECTOR, x.data, x_row + at, at < N, ZERO)
                    load(dy_frag, j * VECTOR, dy.data, dy_row + at, at < N, ZERO)
                    if ADDED:
                        load(other, j * VECTOR, dsummed.data, dsummed_row + at, at < N, ZERO)
                row_mean, row_rstd = ZERO, load_statistic(rstd.data, start(place, rstd.strides))
                if CENTRED:
                    row_mean = load_statistic(mean.data, start(place, mean.strides))
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
                    store(dx.data, dx_row + at, at < N, x_frag, j * VECTOR)
                row += slots
            if DW:
                write(partials, slot, N, begin, N - begin, dw_frag, shared, tid, more)
            if DB:
                write(partials, DB_FIRST * slots + slot, N, begin, N - begin, db_frag, shared, tid, more)
            more = True

    return norm_long_rows_backward
