"""Norms of rows that are kept in registers between their one reading and their writing.

    1  a row is shared by `row_threads` threads of a block; a thread loads `vectors` times 16 bytes
    2  h = x + residual, rounded; layer_norm: mean = sum(h) / N, c = h - mean; rms_norm: c = h     (shuffles, a barrier)
    3  rstd = 1 / sqrt(sum(c * c) / N + eps)                                                        (the same)
    4  y = c * rstd * (w + offset) + b

Backward, where blocks take one row after another and keep dw and db of their columns in registers:

    1  g = dy * (w + offset),  xhat = c * rstd
    2  level = sum(g) / N (layer_norm alone),  along = sum(g * xhat) / N              (shuffles, two barriers)
    3  dx = rstd * (g - level - xhat * along) + dsummed;  dw += dy * xhat;  db += dy
    4  the blocks' dw and db are summed by a second kernel (sums.py)

Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450. Registers: vectors * 16 / itemsize numbers a
thread for each of x, dy, dw and db, and for w where there is no db. Shared memory: two numbers a warp; backward a row
of numbers where a block has several rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from ...spec.meta import compute_dtype
from ..backend import Kernel, builds, cuda, i32, i64, kernel, verb
from ..tile.numbers import numbers
from ..tile.storage import access, storage
from .sums import PIECE, partial_sums
from .variant import Variant, backward_types, forward_types
from .verbs import meet_block, row_axes, row_sums, weights


@dataclass(frozen=True)
class RowsConfig:
    """How a row is dealt to threads. A block has `row_threads * rows` threads, a multiple of 32."""

    row_threads: int  # threads of one block that share a row: a power of two
    vectors: int  # loads a thread makes
    rows: int  # rows a block works on at once
    aligned: bool = True  # rows begin at multiples of 16 bytes and hold whole 16-byte vectors
    min_blocks: int = 1  # blocks that the registers must leave room for on an SM

    @property
    def threads(self) -> int:
        return self.row_threads * self.rows

    def columns(self, dtype: str) -> int:
        """Longest row."""
        return self.row_threads * self.vectors * (storage(dtype).vector if self.aligned else 1)


@builds
def build_forward(config: RowsConfig, variant: Variant) -> Kernel:
    """norm_rows(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset): M rows of N columns."""
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, num_mem = numbers(mem.number), storage(compute_dtype(variant.dtype))
    w_vec = weights(variant.dtype, variant.w, config.aligned)
    b_vec = weights(variant.dtype, variant.b, config.aligned)
    axes, group = row_axes(variant.rank), row_sums(mem.number, config.row_threads, config.rows)
    VECTOR, VECTORS, ROWS, ROW_THREADS = vec.vector, config.vectors, config.rows, config.row_threads
    ELEMENTS, PARTS, RANK = VECTOR * VECTORS, group.size, variant.rank
    CENTRED, ADDED, STATISTICS = variant.centred, variant.added, variant.statistics
    HAS_W, HAS_B = variant.w is not None, variant.b is not None

    @kernel(*forward_types(variant), threads=config.threads, min_blocks=config.min_blocks)
    def norm_rows(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset):
        parts = cuda.shared.array(PARTS, mem.number)
        tid = cuda.threadIdx.x
        column = tid % ROW_THREADS * VECTOR
        row = i64(cuda.blockIdx.x) * ROWS + tid // ROW_THREADS
        frag = cuda.local.array(ELEMENTS, mem.number)  # my part of x[row]
        other = cuda.local.array(ELEMENTS, mem.number)
        w_frag = cuda.local.array(VECTOR, mem.number)
        b_frag = cuda.local.array(VECTOR, mem.number)
        place = cuda.local.array(RANK, i64)
        axes.locate(place, row, sizes)
        x_row, residual_row = axes.start(place, x.strides), axes.start(place, residual.strides)
        for j in range(VECTORS):
            at = column + j * ROW_THREADS * VECTOR
            vec.load(frag, j * VECTOR, x.data, x_row + at, (row < M) & (at < N), num.zero)
            if ADDED:
                vec.load(other, j * VECTOR, residual.data, residual_row + at, (row < M) & (at < N), num.zero)
        if ADDED:
            summed_row = axes.start(place, summed.strides)
            for i in range(ELEMENTS):
                frag[i] = mem.rounded(frag[i] + other[i])
            for j in range(VECTORS):
                at = column + j * ROW_THREADS * VECTOR
                vec.store(summed.data, summed_row + at, (row < M) & (at < N), frag, j * VECTOR)

        row_mean = num.zero
        if CENTRED:
            total = num.zero
            for i in range(ELEMENTS):
                total += frag[i]
            row_mean = group.sum(total, i32(0), parts, tid) / mem.number(N)
            for j in range(VECTORS):
                inside = column + j * ROW_THREADS * VECTOR < N
                for i in range(j * VECTOR, (j + 1) * VECTOR):
                    frag[i] = frag[i] - row_mean if inside else num.zero
        squares = num.zero
        for i in range(ELEMENTS):
            squares += frag[i] * frag[i]
        squares = group.sum(squares, i32(1), parts, tid)
        row_rstd = num.one / mem.number(sqrt(squares / mem.number(N) + eps))

        y_row = axes.start(place, y.strides)
        for j in range(VECTORS):
            at = column + j * ROW_THREADS * VECTOR
            if HAS_W:
                w_vec.load(w_frag, 0, w, i64(at), at < N)
            if HAS_B:
                b_vec.load(b_frag, 0, b, i64(at), at < N)
            for c in range(VECTOR):
                i = j * VECTOR + c
                frag[i] *= row_rstd
                if HAS_W:
                    frag[i] *= w_frag[c] + offset
                if HAS_B:
                    frag[i] += b_frag[c]
            vec.store(y.data, y_row + at, (row < M) & (at < N), frag, j * VECTOR)
        if STATISTICS:  # noqa: SIM102 Numba leaves out what an if on a constant guards
            if (row < M) & (column == 0):
                num_mem.store(rstd.data, axes.start(place, rstd.strides), row_rstd)
                if CENTRED:
                    num_mem.store(mean.data, axes.start(place, mean.strides), row_mean)

    return norm_rows


@builds
def build_backward(config: RowsConfig, variant: Variant) -> Kernel:
    """norm_rows_backward(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots).

    partials has room for `slots` blocks.
    """
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, num_mem = numbers(mem.number), storage(compute_dtype(variant.dtype))
    w_vec, axes = weights(variant.dtype, variant.w, config.aligned), row_axes(variant.rank)
    VECTOR, VECTORS, ROWS, ROW_THREADS = vec.vector, config.vectors, config.rows, config.row_threads
    group = row_sums(mem.number, ROW_THREADS, ROWS)
    sums = partial_sums(variant.dtype, ROW_THREADS, VECTORS, ROWS, config.aligned, variant.sums, meet_block)
    ELEMENTS, STEP, PARTS, SHARED, RANK = VECTOR * VECTORS, ROW_THREADS * VECTOR, group.size, sums.size, variant.rank
    CENTRED, ADDED, HAS_W, DW, DB = variant.centred, variant.added, variant.w is not None, variant.dw, variant.db
    W_KEPT = HAS_W and variant.sums < 2  # beside dw and db there are no registers for it
    DB_FIRST = variant.sums - 1

    @verb
    def read_w(w_frag, j, w, column, left, offset):
        w_vec.load(w_frag, j * VECTOR, w, i64(column) + j * STEP, left > j * STEP)
        for i in range(j * VECTOR, (j + 1) * VECTOR):
            w_frag[i] += offset

    @kernel(*backward_types(variant), threads=config.threads, min_blocks=config.min_blocks)
    def norm_rows_backward(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots):
        parts = cuda.shared.array(PARTS, mem.number)
        shared = cuda.shared.array(SHARED, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        column = tid % ROW_THREADS * VECTOR
        left = i32(N - column)  # columns from my first one on
        first, step = i64(cuda.blockIdx.x) * ROWS, cuda.gridDim.x * ROWS
        half = i32(0)
        place = cuda.local.array(RANK, i64)
        x_frag = cuda.local.array(ELEMENTS, mem.number)  # my part of x[row], then xhat
        dy_frag = cuda.local.array(ELEMENTS, mem.number)
        other = cuda.local.array(VECTOR, mem.number)
        w_frag = cuda.local.array(ELEMENTS, mem.number)
        dw_frag = cuda.local.array(ELEMENTS, mem.number)
        db_frag = cuda.local.array(ELEMENTS, mem.number)
        if W_KEPT:
            for j in range(VECTORS):
                read_w(w_frag, j, w, column, left, offset)

        row = first + tid // ROW_THREADS
        turn, turns = i32(0), i32((M - first + step - 1) // step)
        while turn < turns:
            for i in range(ELEMENTS):
                dw_frag[i] = num.zero
                db_frag[i] = num.zero
            end = i32(min(turn + PIECE, turns))
            more = turn > 0  # than one piece
            while turn < end:
                own = row < M
                axes.locate(place, row, sizes)
                x_row, dy_row = axes.start(place, x.strides) + column, axes.start(place, dy.strides) + column
                for j in range(VECTORS):
                    vec.load(x_frag, j * VECTOR, x.data, x_row + j * STEP, own & (left > j * STEP), num.zero)
                    vec.load(dy_frag, j * VECTOR, dy.data, dy_row + j * STEP, own & (left > j * STEP), num.zero)
                row_mean, row_rstd = num.zero, num.zero
                if own:
                    row_rstd = num_mem.load(rstd.data, axes.start(place, rstd.strides))
                    if CENTRED:
                        row_mean = num_mem.load(mean.data, axes.start(place, mean.strides))

                level, along = num.zero, num.zero
                for j in range(VECTORS):
                    if HAS_W and not W_KEPT:
                        read_w(w_frag, j, w, column, left, offset)
                    for i in range(j * VECTOR, (j + 1) * VECTOR):  # dy is 0 beyond the row
                        x_frag[i] = (x_frag[i] - row_mean) * row_rstd
                        g = dy_frag[i] * w_frag[i] if HAS_W else dy_frag[i]
                        if CENTRED:
                            level += g
                        along += g * x_frag[i]
                if CENTRED:
                    level = group.sum(level, half, parts, tid) / mem.number(N)
                    half ^= 1
                along = group.sum(along, half, parts, tid) / mem.number(N)
                half ^= 1

                dx_row = axes.start(place, dx.strides) + column
                dsummed_row = axes.start(place, dsummed.strides) + column
                for j in range(VECTORS):
                    if ADDED:
                        vec.load(other, 0, dsummed.data, dsummed_row + j * STEP, own & (left > j * STEP), num.zero)
                    if HAS_W and not W_KEPT:
                        read_w(w_frag, j, w, column, left, offset)
                    for c in range(VECTOR):
                        i = j * VECTOR + c
                        g = dy_frag[i] * w_frag[i] if HAS_W else dy_frag[i]
                        if DW:
                            dw_frag[i] += dy_frag[i] * x_frag[i]
                        if DB:
                            db_frag[i] += dy_frag[i]
                        x_frag[i] = (g - level - x_frag[i] * along) * row_rstd
                        if ADDED:
                            x_frag[i] += other[c]
                    vec.store(dx.data, dx_row + j * STEP, own & (left > j * STEP), x_frag, j * VECTOR)
                row += step
                turn = i32(turn + 1)

            slot = i64(cuda.blockIdx.x)
            if DW:
                sums.write(partials, slot, N, 0, N, dw_frag, shared, tid, more)
            if DB:
                sums.write(partials, DB_FIRST * slots + slot, N, 0, N, db_frag, shared, tid, more)
        blocks = i64(cuda.gridDim.x)
        for slot in range(blocks + cuda.blockIdx.x, slots, blocks):
            sums.clear(partials, slot, slots, N, 0, N, tid)

    return norm_rows_backward
