"""Norms, the plainest kernels: one thread per row, and for dw and db one thread per column. Start reading here.

    1  h = x + residual, rounded to x's dtype
    2  layer_norm: mean = sum(h) / N, c = h - mean; rms_norm: c = h
    3  rstd = 1 / sqrt(sum(c * c) / N + eps)
    4  y = c * rstd * (w + offset) + b

Backward, with xhat = c * rstd and g = dy * (w + offset):

    1  dw = sum over rows of dy * xhat,  db = sum over rows of dy
    2  level = sum(g) / N (only layer_norm),  along = sum(g * xhat) / N
    3  dx = rstd * (g - level - xhat * along) + dsummed

Loads are not coalesced: neighbouring threads read addresses that are one row apart, and use one element of every 32
bytes. Sums are compensated (Kahan), since one thread adds up to a million terms.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compiler.backend import Kernel, Members, builds, cuda, i64, kernel, noun, pointer, verb
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import Variant, array_type, forward_types, gradient_types, norm_axes


@dataclass(frozen=True)
class NaiveConfig:
    """One thread per row, or a column."""

    threads: int = 128


@noun
def elements(variant: Variant) -> Members:
    """The verbs for one element."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    w_mem = storage(variant.w or variant.dtype)

    @verb
    def h(arrays, x_index, residual_index):
        value = mem.load(arrays.x.data, x_index)
        if variant.added:
            value = mem.rounded(value + mem.load(arrays.other.data, residual_index))
        return value

    @verb
    def centred(h, mean):
        return h - mean if variant.centred else h

    @verb
    def weight(w, n, offset):
        """Return w[n] + offset, 1 without w."""
        return w_mem.load(w, n) + offset if variant.w is not None else num.one

    return locals()


@builds
def build_forward(config: NaiveConfig, variant: Variant) -> Kernel:
    """Build norm_naive(arrays, params, rows)."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    element, axes, b_mem = elements(variant), norm_axes(variant), storage(variant.b or variant.dtype)

    @kernel(*forward_types(variant), threads=config.threads)
    def norm_naive(arrays, params, rows):
        row = i64(cuda.grid(1))
        if row < rows.M:
            place = axes.place()
            axes.locate(place, row, rows.sizes)
            x_row, residual_row = axes.start(place, arrays.x), axes.start(place, arrays.other)
            row_mean = num.zero
            if variant.centred:
                total, lost = num.zero, num.zero  # lost: the rounding error of the sum
                for n in range(rows.N):
                    h = element.h(arrays, x_row + n, residual_row + n)
                    total, lost = num.add_compensated(total, lost, h)
                row_mean = total / mem.number(rows.N)
            squares, lost = num.zero, num.zero
            for n in range(rows.N):
                c = element.centred(element.h(arrays, x_row + n, residual_row + n), row_mean)
                squares, lost = num.add_compensated(squares, lost, c * c)
            row_rstd = num.rsqrt(squares / mem.number(rows.N) + params.eps)
            y_row, summed_row = axes.start(place, arrays.y), axes.start(place, arrays.summed)
            for n in range(rows.N):
                h = element.h(arrays, x_row + n, residual_row + n)
                value = element.centred(h, row_mean) * row_rstd * element.weight(params.w, i64(n), params.offset)
                if variant.b is not None:
                    value += b_mem.load(params.b, i64(n))
                mem.store(arrays.y.data, y_row + n, value)
                if variant.added:
                    mem.store(arrays.summed.data, summed_row + n, h)
            if variant.statistics:
                axes.write_statistics(place, params, row_mean, row_rstd)

    return norm_naive


@builds
def build_backward(config: NaiveConfig, variant: Variant) -> Kernel:
    """Build norm_naive_backward(dx, inputs, rows, offset), which computes only dx."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    element, axes = elements(variant), norm_axes(variant)

    @kernel(array_type(variant), *gradient_types(variant), mem.number, threads=config.threads)
    def norm_naive_backward(dx, inputs, rows, offset):
        row = i64(cuda.grid(1))
        if row < rows.M:
            place = axes.place()
            axes.locate(place, row, rows.sizes)
            x_row, dy_row = axes.start(place, inputs.x), axes.start(place, inputs.dy)
            row_mean, row_rstd = axes.statistics(place, inputs)
            level, level_lost, along, along_lost = num.zero, num.zero, num.zero, num.zero
            for n in range(rows.N):
                xhat = element.centred(mem.load(inputs.x.data, x_row + n), row_mean) * row_rstd
                g = mem.load(inputs.dy.data, dy_row + n) * element.weight(inputs.w, i64(n), offset)
                if variant.centred:
                    level, level_lost = num.add_compensated(level, level_lost, g)
                along, along_lost = num.add_compensated(along, along_lost, g * xhat)
            level /= mem.number(rows.N)
            along /= mem.number(rows.N)
            dx_row, dsummed_row = axes.start(place, dx), axes.start(place, inputs.dsummed)
            for n in range(rows.N):
                xhat = element.centred(mem.load(inputs.x.data, x_row + n), row_mean) * row_rstd
                g = mem.load(inputs.dy.data, dy_row + n) * element.weight(inputs.w, i64(n), offset)
                value = (g - level - xhat * along) * row_rstd
                if variant.added:
                    value += mem.load(inputs.dsummed.data, dsummed_row + n)
                mem.store(dx.data, dx_row + n, value)

    return norm_naive_backward


@builds
def build_sums(config: NaiveConfig, variant: Variant, dw_dtype: str | None, db_dtype: str | None) -> Kernel:
    """Build norm_naive_sums(dw, db, inputs, rows)."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    element, axes = elements(variant), norm_axes(variant)
    dw_mem, db_mem = storage(dw_dtype or variant.dtype), storage(db_dtype or variant.dtype)

    @kernel(pointer(dw_mem.element), pointer(db_mem.element), *gradient_types(variant), threads=config.threads)
    def norm_naive_sums(dw, db, inputs, rows):
        n = i64(cuda.grid(1))
        if n < rows.N:
            place = axes.place()
            w_sum, w_lost, b_sum, b_lost = num.zero, num.zero, num.zero, num.zero
            for row in range(rows.M):
                axes.locate(place, row, rows.sizes)
                row_mean, row_rstd = axes.statistics(place, inputs)
                xhat = element.centred(mem.load(inputs.x.data, axes.start(place, inputs.x) + n), row_mean) * row_rstd
                gradient = mem.load(inputs.dy.data, axes.start(place, inputs.dy) + n)
                if variant.dw:
                    w_sum, w_lost = num.add_compensated(w_sum, w_lost, gradient * xhat)
                if variant.db:
                    b_sum, b_lost = num.add_compensated(b_sum, b_lost, gradient)
            if variant.dw:
                dw_mem.store(dw, n, w_sum)
            if variant.db:
                db_mem.store(db, n, b_sum)

    return norm_naive_sums
