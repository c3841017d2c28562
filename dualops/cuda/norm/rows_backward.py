"""The gradient of norms without a ring.

Rows that are read once stay in registers until they are written (norm_rows_backward). Blocks process one row after the
other, and keep dw and db of their columns in registers:

    1  g = dy * (w + offset),  xhat = (h - mean) * rstd
    2  level = sum(g) / N (only layer_norm),  along = sum(g * xhat) / N               (shuffles, two barriers)
    3  dx = rstd * (g - level - xhat * along) + dsummed;  dw += dy * xhat;  db += dy
    4  the blocks' dw and db are summed by a second kernel (sums.py)

Rows that are too long for this are read twice. One block per row does steps 1 and 2 (norm_long_rows_means). Then a
block has `columns` of many rows for step 3 (norm_long_rows_backward).

Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450. Registers: vectors * 16 / itemsize numbers
per thread for each of x, dy, dw and db, and for w if there is no db, or if rows are long. Shared memory: four numbers
per warp, and a row of numbers if a block has several rows at once.
"""

from __future__ import annotations

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, pointer, verb
from ..rows.exchange import in_block
from ..rows.operator import Columns
from ..rows.registers import RowsConfig
from ..rows.reread import LongRowsConfig
from ..tile.numbers import numbers
from ..tile.storage import access, storage
from ..tile.unrolled import local_array
from .arguments import Variant, backward_types, gradient_types, norm_axes, weights
from .sums import PIECE, partial_sums


@builds
def build_backward(config: RowsConfig, variant: Variant) -> Kernel:
    """Build norm_rows_backward(dx, partials, inputs, rows, offset, slots).

    partials has room for `slots` blocks.
    """
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, axes = numbers(mem.number), norm_axes(variant)
    w_and_b, group = weights(variant, config.aligned), in_block(mem.number, config.row_threads, config.rows)
    sums = partial_sums(variant, config.row_threads, config.vectors, config.rows, config.aligned)
    STEP = config.row_threads * vec.vector  # columns between a thread's accesses
    make = local_array(config.vectors * vec.vector, mem.number)  # my part of a row
    W_KEPT = variant.weight_gradients < 2  # with both dw and db there are no registers for it

    @verb
    def load_w(w_frag, j, w, column, left, offset):
        """Load access j of w + offset."""
        w_and_b.load_w_plus(w_frag, j * vec.vector, w, i64(column) + j * STEP, left > j * STEP, offset)

    @kernel(*backward_types(variant), threads=config.threads, min_blocks=config.min_blocks)
    def norm_rows_backward(dx, partials, inputs, rows, offset, slots):
        parts, table = group.smem(), sums.table(partials, slots, rows.N)
        tid = cuda.threadIdx.x
        column = tid % config.row_threads * vec.vector
        left = i32(rows.N - column)  # columns from my first column on
        first, step = i64(cuda.blockIdx.x) * config.rows, cuda.gridDim.x * config.rows
        half = i32(0)
        place = axes.place()
        x_frag, dy_frag, other = make(), make(), cuda.local.array(vec.vector, mem.number)  # x_frag: x[row], then xhat
        w_frag, dw_frag, db_frag = make(), make(), make()
        if W_KEPT:
            for j in range(config.vectors):
                load_w(w_frag, j, inputs.w, column, left, offset)

        row = first + tid // config.row_threads
        turn, turns = i32(0), i32((rows.M - first + step - 1) // step)
        while turn < turns:
            for i in range(len(dw_frag)):
                dw_frag[i] = num.zero
                db_frag[i] = num.zero
            end = i32(min(turn + PIECE, turns))
            more = turn > 0  # whether an earlier piece was written
            while turn < end:
                own = row < rows.M
                axes.locate(place, row, rows.sizes)
                x_row, dy_row = axes.start(place, inputs.x) + column, axes.start(place, inputs.dy) + column
                for j in range(config.vectors):
                    keep = own & (left > j * STEP)
                    vec.load(x_frag, j * vec.vector, inputs.x.data, x_row + j * STEP, keep, num.zero)
                    vec.load(dy_frag, j * vec.vector, inputs.dy.data, dy_row + j * STEP, keep, num.zero)
                row_mean, row_rstd = num.zero, num.zero
                if own:
                    row_mean, row_rstd = axes.statistics(place, inputs)

                level, along = num.zero, num.zero
                for j in range(config.vectors):
                    if not W_KEPT:
                        load_w(w_frag, j, inputs.w, column, left, offset)
                    for i in range(j * vec.vector, (j + 1) * vec.vector):  # dy is 0 after the row's end
                        x_frag[i] = (x_frag[i] - row_mean) * row_rstd
                        g = dy_frag[i] * w_frag[i] if variant.w is not None else dy_frag[i]
                        if variant.centred:
                            level += g
                        along += g * x_frag[i]
                if variant.centred:
                    level = group.sum_of_row(level, half, parts) / mem.number(rows.N)
                    half ^= 1
                along = group.sum_of_row(along, half, parts) / mem.number(rows.N)
                half ^= 1

                dx_row = axes.start(place, dx) + column
                dsummed_row = axes.start(place, inputs.dsummed) + column
                for j in range(config.vectors):
                    keep = own & (left > j * STEP)
                    if variant.added:
                        vec.load(other, 0, inputs.dsummed.data, dsummed_row + j * STEP, keep, num.zero)
                    if not W_KEPT:
                        load_w(w_frag, j, inputs.w, column, left, offset)
                    for c in range(vec.vector):
                        i = j * vec.vector + c
                        g = dy_frag[i] * w_frag[i] if variant.w is not None else dy_frag[i]
                        if variant.dw:
                            dw_frag[i] += dy_frag[i] * x_frag[i]
                        if variant.db:
                            db_frag[i] += dy_frag[i]
                        x_frag[i] = (g - level - x_frag[i] * along) * row_rstd
                        if variant.added:
                            x_frag[i] += other[c]
                    vec.store(dx.data, dx_row + j * STEP, keep, x_frag, j * vec.vector)
                row += step
                turn = i32(turn + 1)

            sums.write(table, i64(cuda.blockIdx.x), Columns(0, rows.N), dw_frag, db_frag, more)
        sums.clear(table, i64(cuda.blockIdx.x), i64(cuda.gridDim.x), Columns(0, rows.N))

    return norm_rows_backward


@builds
def build_means(config: LongRowsConfig, variant: Variant) -> Kernel:
    """Build norm_long_rows_means(means, inputs, rows, offset).

    means [2, M]: level, then along.
    """
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, axes = numbers(mem.number), norm_axes(variant)
    w_and_b, group = weights(variant, config.aligned), in_block(mem.number, config.threads, 1)
    COLUMNS, make = config.columns(variant.dtype), local_array(vec.vector, mem.number)

    @kernel(pointer(mem.number), *gradient_types(variant), mem.number, threads=config.threads)
    def norm_long_rows_means(means, inputs, rows, offset):
        parts = group.smem()
        tid = cuda.threadIdx.x
        place = axes.place()
        x_frag, dy_frag, w_frag = make(), make(), make()
        row = i64(cuda.blockIdx.x)
        axes.locate(place, row, rows.sizes)
        x_row, dy_row = axes.start(place, inputs.x), axes.start(place, inputs.dy)
        row_mean, row_rstd = axes.statistics(place, inputs)
        level, along = num.zero, num.zero
        for first in range(0, rows.N, COLUMNS):
            level_piece, along_piece = num.zero, num.zero
            for j in range(config.vectors):
                at = first + (j * config.threads + tid) * vec.vector
                vec.load(x_frag, 0, inputs.x.data, x_row + at, at < rows.N, num.zero)
                vec.load(dy_frag, 0, inputs.dy.data, dy_row + at, at < rows.N, num.zero)
                w_and_b.load_w(w_frag, 0, inputs.w, i64(at), at < rows.N)
                for c in range(vec.vector):
                    g = dy_frag[c] * (w_frag[c] + offset) if variant.w is not None else dy_frag[c]
                    level_piece += g
                    along_piece += g * ((x_frag[c] - row_mean) * row_rstd)
            level += level_piece
            along += along_piece
        level = group.sum_of_row(level, i32(0), parts) / mem.number(rows.N)
        along = group.sum_of_row(along, i32(1), parts) / mem.number(rows.N)
        if tid == 0:
            means[row] = level if variant.centred else num.zero
            means[rows.M + row] = along

    return norm_long_rows_means


@builds
def build_long_backward(config: LongRowsConfig, variant: Variant) -> Kernel:
    """Build norm_long_rows_backward(means, dx, partials, inputs, rows, offset, slots).

    A block processes one of every `slots` rows.
    """
    mem, vec = storage(variant.dtype), access(variant.dtype, config.aligned)
    num, axes, w_and_b = numbers(mem.number), norm_axes(variant), weights(variant, config.aligned)
    sums = partial_sums(variant, config.threads, config.vectors, 1, config.aligned)
    COLUMNS, make = config.columns(variant.dtype), local_array(config.vectors * vec.vector, mem.number)

    @kernel(pointer(mem.number), *backward_types(variant), threads=config.threads)
    def norm_long_rows_backward(means, dx, partials, inputs, rows, offset, slots):
        table = sums.table(partials, slots, rows.N)
        tid = cuda.threadIdx.x
        place = axes.place()
        x_frag, dy_frag, other, w_frag, dw_frag, db_frag = make(), make(), make(), make(), make(), make()
        tiles = (rows.N + COLUMNS - 1) // COLUMNS
        begin = cuda.blockIdx.x % tiles * COLUMNS
        slot = i64(cuda.blockIdx.x // tiles)
        for j in range(config.vectors):
            at = begin + (j * config.threads + tid) * vec.vector
            w_and_b.load_w_plus(w_frag, j * vec.vector, inputs.w, i64(at), at < rows.N, offset)
        row = slot
        more = False  # whether an earlier piece was written
        while row < rows.M:
            for i in range(len(x_frag)):
                dw_frag[i] = num.zero
                db_frag[i] = num.zero
            end = min(row + PIECE * slots, rows.M)
            while row < end:
                axes.locate(place, row, rows.sizes)
                x_row, dy_row = axes.start(place, inputs.x), axes.start(place, inputs.dy)
                dx_row, dsummed_row = axes.start(place, dx), axes.start(place, inputs.dsummed)
                for j in range(config.vectors):
                    at = begin + (j * config.threads + tid) * vec.vector
                    vec.load(x_frag, j * vec.vector, inputs.x.data, x_row + at, at < rows.N, num.zero)
                    vec.load(dy_frag, j * vec.vector, inputs.dy.data, dy_row + at, at < rows.N, num.zero)
                    if variant.added:
                        vec.load(other, j * vec.vector, inputs.dsummed.data, dsummed_row + at, at < rows.N, num.zero)
                row_mean, row_rstd = axes.statistics(place, inputs)
                level, along = means[row], means[rows.M + row]
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
                    vec.store(dx.data, dx_row + at, at < rows.N, x_frag, j * vec.vector)
                row += slots
            sums.write(table, slot, Columns(begin, rows.N - begin), dw_frag, db_frag, more)
            more = True

    return norm_long_rows_backward
