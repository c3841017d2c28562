"""softmax, the first idea: one thread a row, which reads it three times. Where a reader starts.

    1  maximum of the row
    2  sum of exp(x - maximum), compensated
    3  y = exp(x - maximum) / sum

Neighbouring threads read addresses a row apart, so that of every 32 bytes that a load brings one element was asked for.
Rows and elements are found as in strided.py, by three strides and a fourth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ...spec import ArrayMeta, Problem
from ..backend import Kernel, builds, cuda, i64, kernel, pointer
from ..device import Device
from ..plans import Choice
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import MOST_AXES, Call, one_step
from .strided import row_offset


@dataclass(frozen=True)
class NaiveConfig:
    """A thread a row."""

    threads: int = 128


@builds
def build_forward(config: NaiveConfig, dtype: str) -> Kernel:
    """softmax_naive(y, x, M, N, size1, size2, y0, y1, y2, y_step, x0, x1, x2, x_step)."""
    mem = storage(dtype)
    num = numbers(mem.number)

    @kernel(pointer(mem.element), pointer(mem.element), *[i64] * 12, threads=config.threads)
    def softmax_naive(y, x, M, N, size1, size2, y0, y1, y2, y_step, x0, x1, x2, x_step):
        row = i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if row < M:
            x_row = row_offset(row, size1, size2, x0, x1, x2)
            y_row = row_offset(row, size1, size2, y0, y1, y2)
            row_max = num.minus_inf
            for n in range(N):
                row_max = num.maximum(row_max, mem.load(x, x_row + n * x_step))
            row_sum = num.zero
            lost = num.zero  # what the last additions rounded away: one thread adds up to a million terms
            for n in range(N):
                row_sum, lost = num.add_compensated(row_sum, lost, num.exp(mem.load(x, x_row + n * x_step) - row_max))
            for n in range(N):
                mem.store(y, y_row + n * y_step, num.exp(mem.load(x, x_row + n * x_step) - row_max) / row_sum)

    return softmax_naive


@builds
def build_backward(config: NaiveConfig, dtype: str) -> Kernel:
    """softmax_naive_backward(dx, y, dy, M, N, size1, size2, then four strides for each of dx, y, dy)."""
    mem = storage(dtype)
    num = numbers(mem.number)

    @kernel(pointer(mem.element), pointer(mem.element), pointer(mem.element), *[i64] * 16, threads=config.threads)
    def softmax_naive_backward(
        dx, y, dy, M, N, size1, size2, dx0, dx1, dx2, dx_step, y0, y1, y2, y_step, dy0, dy1, dy2, dy_step
    ):
        row = i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if row < M:
            dx_row = row_offset(row, size1, size2, dx0, dx1, dx2)
            y_row = row_offset(row, size1, size2, y0, y1, y2)
            dy_row = row_offset(row, size1, size2, dy0, dy1, dy2)
            # dx = y * (dy - dot)  with  dot = sum(y * dy)
            dot = num.zero
            lost = num.zero
            for n in range(N):
                term = mem.load(y, y_row + n * y_step) * mem.load(dy, dy_row + n * dy_step)
                dot, lost = num.add_compensated(dot, lost, term)
            for n in range(N):
                mem.store(
                    dx,
                    dx_row + n * dx_step,
                    mem.load(y, y_row + n * y_step) * (mem.load(dy, dy_row + n * dy_step) - dot),
                )

    return softmax_naive_backward


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """A thread a row, of any layout that the kernel can be told."""
    return _choices(Call(problem, results), build_forward)


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The same of the gradient."""
    return _choices(Call(problem, results), build_backward)


def _choices(call: Call, build: Callable[..., Kernel]) -> Iterator[Choice]:
    if len(call.sizes) > MOST_AXES:
        return
    config = NaiveConfig()
    make = partial(one_step, build, config, call.dtype, -(-call.M // config.threads), call.strided_args)
    yield Choice("naive", config, "one thread a row", make)
