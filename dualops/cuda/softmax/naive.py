"""softmax, the plainest kernel: one thread per row, which reads it three times. Start reading here.

    1  maximum of the row
    2  sum of exp(x - maximum), compensated
    3  y = exp(x - maximum) / sum

Loads are not coalesced: neighbouring threads read addresses that are one row apart, and use one element of every 32
bytes. Rows must be contiguous; strided.py serves others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ..compiler.backend import Kernel, builds, cuda, i64, kernel, pointer
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import Call


@dataclass(frozen=True)
class NaiveConfig:
    """One thread per row."""

    threads: int = 128


@builds
def build_forward(config: NaiveConfig, dtype: str) -> Kernel:
    """Build softmax_naive(y, x, M, N, y_stride, x_stride), for M rows of N elements."""
    mem = storage(dtype)
    num = numbers(mem.number)

    @kernel(pointer(mem.element), pointer(mem.element), *[i64] * 4, threads=config.threads)
    def softmax_naive(y, x, M, N, y_stride, x_stride):
        row = i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if row < M:
            x_row, y_row = row * x_stride, row * y_stride
            row_max = num.minus_inf
            for n in range(N):
                row_max = num.maximum(row_max, mem.load(x, x_row + n))
            row_sum = num.zero
            lost = num.zero  # the rounding error of the sum: one thread adds up to a million terms
            for n in range(N):
                row_sum, lost = num.add_compensated(row_sum, lost, num.exp(mem.load(x, x_row + n) - row_max))
            for n in range(N):
                mem.store(y, y_row + n, num.exp(mem.load(x, x_row + n) - row_max) / row_sum)

    return softmax_naive


@builds
def build_backward(config: NaiveConfig, dtype: str) -> Kernel:
    """Build softmax_naive_backward(dx, y, dy, M, N, dx_stride, y_stride, dy_stride), for M rows of N elements."""
    mem = storage(dtype)
    num = numbers(mem.number)

    @kernel(*[pointer(mem.element)] * 3, *[i64] * 5, threads=config.threads)
    def softmax_naive_backward(dx, y, dy, M, N, dx_stride, y_stride, dy_stride):
        row = i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if row < M:
            dx_row, y_row, dy_row = row * dx_stride, row * y_stride, row * dy_stride
            # dx = y * (dy - dot)  with  dot = sum(y * dy)
            dot = num.zero
            lost = num.zero
            for n in range(N):
                term = mem.load(y, y_row + n) * mem.load(dy, dy_row + n)
                dot, lost = num.add_compensated(dot, lost, term)
            for n in range(N):
                mem.store(dx, dx_row + n, mem.load(y, y_row + n) * (mem.load(dy, dy_row + n) - dot))

    return softmax_naive_backward


def choices(call: Call, device: Device) -> Iterator[Choice]:
    """Yield the kernel with one thread per row, if rows are contiguous."""
    if call.contiguous:
        config = NaiveConfig()
        yield Choice("naive", config, "one thread per row", partial(_steps, config, call))


def _steps(config: NaiveConfig, call: Call) -> list[Step]:
    build, args = build_backward if call.kind.backward else build_forward, (*call.metas, call.M, call.N)
    return [Step(build(config, call.dtype), (cdiv(call.M, config.threads),), (*args, *call.row_strides))]
