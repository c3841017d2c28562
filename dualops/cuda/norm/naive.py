"""Norms, the first idea: a thread a row, and for dw and db a thread a column. Where a reader starts.

    1  h = x + residual, rounded to x's dtype
    2  layer_norm: mean = sum(h) / N, c = h - mean; rms_norm: c = h
    3  rstd = 1 / sqrt(sum(c * c) / N + eps)
    4  y = c * rstd * (w + offset) + b

Backward, with xhat = c * rstd and g = dy * (w + offset):

    1  dw = sum over rows of dy * xhat,  db = sum over rows of dy
    2  level = sum(g) / N (layer_norm alone),  along = sum(g * xhat) / N
    3  dx = rstd * (g - level - xhat * along) + dsummed

Neighbouring threads read addresses a row apart, so that of every 32 bytes fetched one element is used. Sums are
compensated (Kahan): one thread adds up to a million terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...spec.meta import compute_dtype
from ..backend import Kernel, builds, cuda, i64, kernel, pointer, verb
from ..tile import numbers, storage
from .variant import Variant, backward_types, forward_types
from .verbs import inverse_root, places


@dataclass(frozen=True)
class NaiveConfig:
    """A thread a row, or a column."""

    threads: int = 128


class Elements(NamedTuple):
    """What becomes of one element."""

    h: Callable[..., Any]  # (x, x_index, residual, residual_index)
    centred: Callable[..., Any]  # (h, mean)
    weight: Callable[..., Any]  # (w, n, offset): w[n] + offset, 1 without w


def elements(variant: Variant, residual: bool) -> Elements:
    """The verbs; residual: whether h is a sum."""
    kept = storage(variant.dtype)
    load, rounded, load_w = kept.load, kept.rounded, storage(variant.w or variant.dtype).load
    RESIDUAL, CENTRED, HAS_W, ONE = residual, variant.centred, variant.w is not None, kept.number(1)

    @verb
    def h(x, x_index, residual, residual_index):
        value = load(x, x_index)
        if RESIDUAL:
            value = rounded(value + load(residual, residual_index))
        return value

    @verb
    def centred(h, mean):
        return h - mean if CENTRED else h

    @verb
    def weight(w, n, offset):
        return load_w(w, n) + offset if HAS_W else ONE

    return Elements(h, centred, weight)


@builds
def build_forward(config: NaiveConfig, variant: Variant) -> Kernel:
    """norm_naive(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset)."""
    kept = storage(variant.dtype)
    number, store, load_b = kept.number, kept.store, storage(variant.b or variant.dtype).load
    store_statistic, add = storage(compute_dtype(variant.dtype)).store, numbers(number).add_compensated
    element, centred, weight = elements(variant, variant.added)
    (locate, start), rsqrt = places(variant.rank), inverse_root(number)
    CENTRED, ADDED, HAS_B, STATISTICS = variant.centred, variant.added, variant.b is not None, variant.statistics
    RANK, ZERO = variant.rank, number(0)

    @kernel(*forward_types(variant), threads=config.threads)
    def norm_naive(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset):
        row = i64(cuda.grid(1))
        if row < M:
            place = cuda.local.array(RANK, i64)
            locate(place, row, sizes)
            x_row, residual_row = start(place, x.strides), start(place, residual.strides)
            row_mean = ZERO
            if CENTRED:
                total, lost = ZERO, ZERO  # what the last additions rounded away
                for n in range(N):
                    total, lost = add(total, lost, element(x.data, x_row + n, residual.data, residual_row + n))
                row_mean = total / number(N)
            squares, lost = ZERO, ZERO
            for n in range(N):
                c = centred(element(x.data, x_row + n, residual.data, residual_row + n), row_mean)
                squares, lost = add(squares, lost, c * c)
            row_rstd = rsqrt(squares / number(N) + eps)
            y_row, summed_row = start(place, y.strides), start(place, summed.strides)
            for n in range(N):
                h = element(x.data, x_row + n, residual.data, residual_row + n)
                value = centred(h, row_mean) * row_rstd * weight(w, i64(n), offset)
                if HAS_B:
                    value += load_b(b, i64(n))
                store(y.data, y_row + n, value)
                if ADDED:
                    store(summed.data, summed_row + n, h)
            if STATISTICS:
                store_statistic(rstd.data, start(place, rstd.strides), row_rstd)
                if CENTRED:
                    store_statistic(mean.data, start(place, mean.strides), row_mean)

    return norm_naive


@builds
def build_backward(config: NaiveConfig, variant: Variant) -> Kernel:
    """norm_naive_backward(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots): dx alone."""
    kept = storage(variant.dtype)
    number, load, store = kept.number, kept.load, kept.store
    load_statistic, add = storage(compute_dtype(variant.dtype)).load, numbers(number).add_compensated
    _, centred, weight = elements(variant, False)
    locate, start = places(variant.rank)
    CENTRED, ADDED, RANK, ZERO = variant.centred, variant.added, variant.rank, number(0)

    @kernel(*backward_types(variant), threads=config.threads)
    def norm_naive_backward(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots):
        row = i64(cuda.grid(1))
        if row < M:
            place = cuda.local.array(RANK, i64)
            locate(place, row, sizes)
            x_row, dy_row = start(place, x.strides), start(place, dy.strides)
            row_mean, row_rstd = ZERO, load_statistic(rstd.data, start(place, rstd.strides))
            if CENTRED:
                row_mean = load_statistic(mean.data, start(place, mean.strides))
            level, level_lost, along, along_lost = ZERO, ZERO, ZERO, ZERO
            for n in range(N):
                xhat = centred(load(x.data, x_row + n), row_mean) * row_rstd
                g = load(dy.data, dy_row + n) * weight(w, i64(n), offset)
                if CENTRED:
                    level, level_lost = add(level, level_lost, g)
                along, along_lost = add(along, along_lost, g * xhat)
            level /= number(N)
            along /= number(N)
            dx_row, dsummed_row = start(place, dx.strides), start(place, dsummed.strides)
            for n in range(N):
                xhat = centred(load(x.data, x_row + n), row_mean) * row_rstd
                g = load(dy.data, dy_row + n) * weight(w, i64(n), offset)
                value = (g - level - xhat * along) * row_rstd
                if ADDED:
                    value += load(dsummed.data, dsummed_row + n)
                store(dx.data, dx_row + n, value)

    return norm_naive_backward


@builds
def build_sums(config: NaiveConfig, variant: Variant, dw_dtype: str | None, db_dtype: str | None) -> Kernel:
    """norm_naive_sums(dw, db, dx, partials, x, mean, rstd, dy, ...), the last as norm_naive_backward has them."""
    kept = storage(variant.dtype)
    number, load = kept.number, kept.load
    load_statistic, add = storage(compute_dtype(variant.dtype)).load, numbers(number).add_compensated
    store_dw, store_db = storage(dw_dtype or variant.dtype).store, storage(db_dtype or variant.dtype).store
    vectors = [pointer(storage(dtype or variant.dtype).element) for dtype in (dw_dtype, db_dtype)]
    _, centred, _ = elements(variant, False)
    locate, start = places(variant.rank)
    CENTRED, DW, DB, RANK, ZERO = variant.centred, dw_dtype is not None, db_dtype is not None, variant.rank, number(0)

    @kernel(*vectors, *backward_types(variant), threads=config.threads)
    def norm_naive_sums(dw, db, dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots):
        n = i64(cuda.grid(1))
        if n < N:
            place = cuda.local.array(RANK, i64)
            w_sum, w_lost, b_sum, b_lost = ZERO, ZERO, ZERO, ZERO
            for row in range(M):
                locate(place, row, sizes)
                row_mean, row_rstd = ZERO, load_statistic(rstd.data, start(place, rstd.strides))
                if CENTRED:
                    row_mean = load_statistic(mean.data, start(place, mean.strides))
                xhat = centred(load(x.data, start(place, x.strides) + n), row_mean) * row_rstd
                gradient = load(dy.data, start(place, dy.strides) + n)
                if DW:
                    w_sum, w_lost = add(w_sum, w_lost, gradient * xhat)
                if DB:
                    b_sum, b_lost = add(b_sum, b_lost, gradient)
            if DW:
                store_dw(dw, n, w_sum)
            if DB:
                store_db(db, n, b_sum)

    return norm_naive_sums
