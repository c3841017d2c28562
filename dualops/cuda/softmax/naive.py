"""softmax, the first idea: one thread a row, which reads it three times. Where a reader starts.

    1  maximum of the row
    2  sum of exp(x - maximum), compensated
    3  y = exp(x - maximum) / sum

Neighbouring threads read addresses a row apart, so that of every 32 bytes that a load brings one element was asked for.
Rows and elements are found as in strided.py, by three strides and a fourth.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..backend import Kernel, builds, cuda, i64, kernel, pointer
from ..tile import numbers, storage
from .strided import row_offset


@dataclass(frozen=True)
class NaiveConfig:
    """A thread a row."""

    threads: int = 128


@builds
def build_forward(config: NaiveConfig, dtype: str) -> Kernel:
    """softmax_naive(y, x, M, N, size1, size2, y0, y1, y2, y_step, x0, x1, x2, x_step)."""
    kept = storage(dtype)
    number, element, load, store = kept.number, kept.element, kept.load, kept.store
    maximum, exp, add = numbers(number).maximum, numbers(number).exp, numbers(number).add_compensated
    NOTHING, ZERO = number(-inf), number(0)

    @kernel(pointer(element), pointer(element), *[i64] * 12, threads=config.threads)
    def softmax_naive(y, x, M, N, size1, size2, y0, y1, y2, y_step, x0, x1, x2, x_step):
        row = i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if row < M:
            x_row = row_offset(row, size1, size2, x0, x1, x2)
            y_row = row_offset(row, size1, size2, y0, y1, y2)
            row_max = NOTHING
            for n in range(N):
                row_max = maximum(row_max, load(x, x_row + n * x_step))
            row_sum = ZERO
            lost = ZERO  # what the last additions rounded away: one thread adds up to a million terms
            for n in range(N):
                row_sum, lost = add(row_sum, lost, exp(load(x, x_row + n * x_step) - row_max))
            for n in range(N):
                store(y, y_row + n * y_step, exp(load(x, x_row + n * x_step) - row_max) / row_sum)

    return softmax_naive


@builds
def build_backward(config: NaiveConfig, dtype: str) -> Kernel:
    """softmax_naive_backward(dx, y, dy, M, N, size1, size2, then four strides for each of dx, y, dy)."""
    kept = storage(dtype)
    number, element, load, store = kept.number, kept.element, kept.load, kept.store
    add, ZERO = numbers(number).add_compensated, number(0)

    @kernel(pointer(element), pointer(element), pointer(element), *[i64] * 16, threads=config.threads)
    def softmax_naive_backward(
        dx, y, dy, M, N, size1, size2, dx0, dx1, dx2, dx_step, y0, y1, y2, y_step, dy0, dy1, dy2, dy_step
    ):
        row = i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if row < M:
            dx_row = row_offset(row, size1, size2, dx0, dx1, dx2)
            y_row = row_offset(row, size1, size2, y0, y1, y2)
            dy_row = row_offset(row, size1, size2, dy0, dy1, dy2)
            # dx = y * (dy - dot)  with  dot = sum(y * dy)
            dot = ZERO
            lost = ZERO
            for n in range(N):
                term = load(y, y_row + n * y_step) * load(dy, dy_row + n * dy_step)
                dot, lost = add(dot, lost, term)
            for n in range(N):
                store(dx, dx_row + n * dx_step, load(y, y_row + n * y_step) * (load(dy, dy_row + n * dy_step) - dot))

    return softmax_naive_backward
