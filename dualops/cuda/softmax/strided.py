"""softmax along any axis of any layout: rows are found by up to three strides, elements by a fourth.

A block has `lanes` rows side by side and `columns` threads for each. Where neighbouring rows are neighbours in memory,
32 lanes read them together; where the row itself is contiguous, all threads share one. Each row is read twice, as in
rows/reread.py; the threads of a row merge through shared memory. A thread adds up to N / 8 numbers, eight at once, and
carries along what each addition loses, so that the sum of a million is as good as one of a hundred. Shared memory: two
numbers a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, builds, cuda, i64, kernel, pointer, verb
from ..launch.device import Device
from ..launch.plans import Choice
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import MOST_AXES, Call, one_step


@dataclass(frozen=True)
class StridedConfig:
    """How rows are dealt to a block of `lanes * columns` threads."""

    lanes: int  # rows that a block works on, side by side
    columns: int  # threads that share one row
    batch: int = 8  # elements a thread has under way, and sums before it adds them to its total, with compensation

    @cached_property
    def threads(self) -> int:
        return self.lanes * self.columns


@verb
def row_offset(row, size1, size2, stride0, stride1, stride2):
    """Where row number `row` of a [size0, size1, size2] grid of rows begins."""
    return row // (size1 * size2) * stride0 + row // size2 % size1 * stride1 + row % size2 * stride2


@builds
def build_forward(config: StridedConfig, dtype: str) -> Kernel:
    """softmax_strided(y, x, M, N, size1, size2, y0, y1, y2, y_step, x0, x1, x2, x_step): strides of rows, elements."""
    mem = storage(dtype)
    num = numbers(mem.number)

    @kernel(pointer(mem.element), pointer(mem.element), *[i64] * 12, threads=config.threads)
    def softmax_strided(y, x, M, N, size1, size2, y0, y1, y2, y_step, x0, x1, x2, x_step):
        tid = cuda.threadIdx.x
        lane, column = tid % config.lanes, tid // config.lanes
        row = i64(cuda.blockIdx.x) * config.lanes + lane
        x_row = row_offset(row, size1, size2, x0, x1, x2)
        y_row = row_offset(row, size1, size2, y0, y1, y2)
        end = N if row < M else i64(0)
        my_max = num.minus_inf
        my_sum, lost = num.zero, num.zero
        batch = cuda.local.array(config.batch, mem.number)
        for start in range(column, end, config.columns * config.batch):
            batch_max = num.minus_inf
            for i in range(config.batch):
                batch[i] = num.minus_inf
                if start + i * config.columns < end:
                    batch[i] = mem.load(x, x_row + (start + i * config.columns) * x_step)
                batch_max = num.maximum(batch_max, batch[i])
            new_max = num.maximum(my_max, batch_max)
            base = num.base(new_max)
            batch_sum = num.zero
            for i in range(config.batch):
                batch_sum += num.exp(batch[i] - base)
            rescale = num.exp(my_max - base)
            my_sum, lost = num.add_compensated(my_sum * rescale, lost * rescale, batch_sum)
            my_max = new_max

        part_max = cuda.shared.array(config.threads, mem.number)
        part_sum = cuda.shared.array(config.threads, mem.number)
        part_max[tid] = my_max
        part_sum[tid] = my_sum
        cuda.syncthreads()
        row_max = num.minus_inf
        for part in range(lane, config.threads, config.lanes):
            row_max = num.maximum(row_max, part_max[part])
        base = num.base(row_max)
        row_sum = num.zero
        for part in range(lane, config.threads, config.lanes):
            row_sum += part_sum[part] * num.exp(part_max[part] - base)
        rescale = num.one / row_sum

        for n in range(column, end, config.columns):
            mem.store(y, y_row + n * y_step, num.exp(mem.load(x, x_row + n * x_step) - base) * rescale)

    return softmax_strided


@builds
def build_backward(config: StridedConfig, dtype: str) -> Kernel:
    """softmax_strided_backward(dx, y, dy, M, N, size1, size2, then four strides for each of dx, y, dy)."""
    mem = storage(dtype)
    num = numbers(mem.number)

    @kernel(pointer(mem.element), pointer(mem.element), pointer(mem.element), *[i64] * 16, threads=config.threads)
    def softmax_strided_backward(
        dx, y, dy, M, N, size1, size2, dx0, dx1, dx2, dx_step, y0, y1, y2, y_step, dy0, dy1, dy2, dy_step
    ):
        tid = cuda.threadIdx.x
        lane, column = tid % config.lanes, tid // config.lanes
        row = i64(cuda.blockIdx.x) * config.lanes + lane
        dx_row = row_offset(row, size1, size2, dx0, dx1, dx2)
        y_row = row_offset(row, size1, size2, y0, y1, y2)
        dy_row = row_offset(row, size1, size2, dy0, dy1, dy2)
        end = N if row < M else i64(0)
        # dx = y * (dy - dot)  with  dot = sum(y * dy)
        my_dot, lost = num.zero, num.zero
        for start in range(column, end, config.columns * config.batch):
            batch_dot = num.zero
            for i in range(config.batch):
                n = start + i * config.columns
                if n < end:
                    batch_dot += mem.load(y, y_row + n * y_step) * mem.load(dy, dy_row + n * dy_step)
            my_dot, lost = num.add_compensated(my_dot, lost, batch_dot)
        part_dot = cuda.shared.array(config.threads, mem.number)
        part_dot[tid] = my_dot
        cuda.syncthreads()
        dot = num.zero
        for part in range(lane, config.threads, config.lanes):
            dot += part_dot[part]
        for n in range(column, end, config.columns):
            mem.store(
                dx, dx_row + n * dx_step, mem.load(y, y_row + n * y_step) * (mem.load(dy, dy_row + n * dy_step) - dot)
            )

    return softmax_strided_backward


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Lanes side by side where neighbouring rows are, or along a row."""
    return _choices(Call(problem, results), build_forward)


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the choices for the gradient."""
    return _choices(Call(problem, results), build_backward)


def _choices(call: Call, build: Callable[..., Kernel]) -> Iterator[Choice]:
    if len(call.sizes) > MOST_AXES:
        return
    together = min(call.steps) > 1
    config = StridedConfig(32, 8) if together else StridedConfig(1, 128)
    reason = "neighbouring rows are read together" if together else "rows lie along more than one stride"
    make = partial(one_step, build, config, call.dtype, -(-call.M // config.lanes), call.strided_args)
    yield Choice("simt", config, reason, make)
