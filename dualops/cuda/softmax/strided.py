"""softmax along any axis of any layout: up to three strides for rows, and a fourth for elements.

A block has `lanes` adjacent rows and `columns` threads for each. If neighbouring rows are neighbours in memory, 32
lanes read them together; if a row is contiguous, all threads share it. Each row is read twice, as in rows/reread.py,
and the threads of a row merge through shared memory. A thread adds up to N / 8 numbers, eight at once, with
compensation. So a sum of a million is as accurate as one of a hundred. Shared memory: two numbers per thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ..compiler.backend import Kernel, builds, cuda, i64, kernel, types
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..row_walk import row_axes
from ..rows.operator import Rows, arrays_type
from ..tile.numbers import numbers
from ..tile.storage import storage
from .arguments import Call

MOST_AXES = 3  # most axes along which rows lie


@dataclass(frozen=True)
class StridedConfig:
    """A block has `lanes * columns` threads."""

    lanes: int  # adjacent rows of a block
    columns: int  # threads that share one row
    batch: int = 8  # elements that a thread loads and sums at once, before it adds them to its total with compensation

    @cached_property
    def threads(self) -> int:
        return self.lanes * self.columns


def argument_types(dtype: str) -> tuple[Any, ...]:
    """Return the types of `RowArrays`, each with its strides of rows and then that of elements, and of `Rows`."""
    return arrays_type(dtype, MOST_AXES + 1), types.NamedTuple((i64, i64, types.UniTuple(i64, MOST_AXES)), Rows)


@builds
def build_forward(config: StridedConfig, dtype: str) -> Kernel:
    """Build softmax_strided(arrays, rows)."""
    mem, axes = storage(dtype), row_axes(MOST_AXES)
    num = numbers(mem.number)

    @kernel(*argument_types(dtype), threads=config.threads)
    def softmax_strided(arrays, rows):
        y, x, N, place = arrays.y.data, arrays.x.data, rows.N, axes.place()
        y_step, x_step = arrays.y.strides[MOST_AXES], arrays.x.strides[MOST_AXES]
        tid = cuda.threadIdx.x
        lane, column = tid % config.lanes, tid // config.lanes
        row = i64(cuda.blockIdx.x) * config.lanes + lane
        axes.locate(place, row, rows.sizes)
        y_row, x_row = axes.start(place, arrays.y), axes.start(place, arrays.x)
        end = N if row < rows.M else i64(0)
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
    """Build softmax_strided_backward(arrays, rows), where x is softmax's y, the other input is dy, and y is dx."""
    mem, axes = storage(dtype), row_axes(MOST_AXES)
    num = numbers(mem.number)

    @kernel(*argument_types(dtype), threads=config.threads)
    def softmax_strided_backward(arrays, rows):
        dx, y, dy, N, place = arrays.y.data, arrays.x.data, arrays.other.data, rows.N, axes.place()
        dx_step, y_step = arrays.y.strides[MOST_AXES], arrays.x.strides[MOST_AXES]
        dy_step = arrays.other.strides[MOST_AXES]
        tid = cuda.threadIdx.x
        lane, column = tid % config.lanes, tid // config.lanes
        row = i64(cuda.blockIdx.x) * config.lanes + lane
        axes.locate(place, row, rows.sizes)
        dx_row, y_row = axes.start(place, arrays.y), axes.start(place, arrays.x)
        dy_row = axes.start(place, arrays.other)
        end = N if row < rows.M else i64(0)
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


def choices(call: Call, device: Device) -> Iterator[Choice]:
    """Yield the kernel with lanes along neighbouring rows if these are adjacent in memory, else along a row."""
    if len(call.sizes) > MOST_AXES:
        return
    together = min(call.steps) > 1
    config = StridedConfig(32, 8) if together else StridedConfig(1, 128)
    reason = "neighbouring rows are read together" if together else "rows lie along more than one stride"
    yield Choice("simt", config, reason, partial(_steps, config, call))


def _steps(config: StridedConfig, call: Call) -> list[Step]:
    build = build_backward if call.kind.backward else build_forward
    return [Step(build(config, call.dtype), (cdiv(call.M, config.lanes),), call.strided_arguments(MOST_AXES))]
