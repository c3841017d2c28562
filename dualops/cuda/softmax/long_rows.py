"""softmax of rows too long to be kept: each is read twice, by one block.

    1  every thread runs over its share of the row, with a running maximum and the sum in units of exp(maximum)
    2  the block merges them: maximum of maxima, sums rescaled to it     (shuffles, one barrier)
    3  the row is read again: y = exp(x - row maximum) / row sum

Milakov & Gimelshein 2018, arXiv:1805.02867, Algorithm 3. Registers: vectors * 16 / itemsize numbers a thread and array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, pointer
from ..launch.device import Device
from ..launch.plans import Choice
from ..tile.numbers import numbers
from ..tile.rows import lane_reductions
from ..tile.storage import access, storage
from .arguments import Call, one_step


@dataclass(frozen=True)
class LongRowsConfig:
    """A block a row."""

    threads: int  # a multiple of 32
    vectors: int  # independent loads a thread has under way
    aligned: bool = True
    min_blocks: int = 1

    @cached_property
    def warps(self) -> int:
        return self.threads // 32


@builds
def build_forward(config: LongRowsConfig, dtype: str) -> Kernel:
    """softmax_long_rows(y, x, N, y_stride, x_stride)."""
    mem, vec = storage(dtype), access(dtype, config.aligned)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, 32)

    @kernel(
        pointer(mem.element), pointer(mem.element), i32, i64, i64, threads=config.threads, min_blocks=config.min_blocks
    )
    def softmax_long_rows(y, x, N, y_stride, x_stride):
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        x_row = i64(cuda.blockIdx.x) * x_stride
        y_row = i64(cuda.blockIdx.x) * y_stride
        chunk = config.threads * config.vectors * vec.vector  # columns that the block reads at once
        frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        my_max = num.minus_inf
        my_sum = num.zero
        for start in range(0, N, chunk):
            for j in range(config.vectors):
                at = start + (j * config.threads + tid) * vec.vector
                vec.load(frag, j * vec.vector, x, x_row + at, at < N, num.minus_inf)
            chunk_max = num.minus_inf
            for i in range(len(frag)):
                chunk_max = num.maximum(chunk_max, frag[i])
            new_max = num.maximum(my_max, chunk_max)
            base = num.base(new_max)
            chunk_sum = num.zero  # added as one, so that a long row's sum keeps its last bits
            for i in range(len(frag)):
                chunk_sum += num.exp(frag[i] - base)
            my_sum = my_sum * num.exp(my_max - base) + chunk_sum
            my_max = new_max

        part_max = cuda.shared.array(config.warps, mem.number)
        part_sum = cuda.shared.array(config.warps, mem.number)
        warp_max = lanes.max(my_max)
        warp_sum = lanes.sum(my_sum * num.exp(my_max - num.base(warp_max)))
        if lane == 0:
            part_max[warp] = warp_max
            part_sum[warp] = warp_sum
        cuda.syncthreads()
        their_max = part_max[lane] if lane < config.warps else num.minus_inf
        their_sum = part_sum[lane] if lane < config.warps else num.zero
        base = num.base(lanes.max(their_max))
        rescale = num.one / lanes.sum(their_sum * num.exp(their_max - base))

        for start in range(0, N, chunk):
            for j in range(config.vectors):
                at = start + (j * config.threads + tid) * vec.vector
                vec.load(frag, j * vec.vector, x, x_row + at, at < N, num.minus_inf)
            for i in range(len(frag)):
                frag[i] = num.exp(frag[i] - base) * rescale
            for j in range(config.vectors):
                at = start + (j * config.threads + tid) * vec.vector
                vec.store(y, y_row + at, at < N, frag, j * vec.vector)

    return softmax_long_rows


@builds
def build_backward(config: LongRowsConfig, dtype: str) -> Kernel:
    """softmax_long_rows_backward(dx, y, dy, N, dx_stride, y_stride, dy_stride)."""
    mem, vec = storage(dtype), access(dtype, config.aligned)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, 32)

    @kernel(
        pointer(mem.element),
        pointer(mem.element),
        pointer(mem.element),
        i32,
        i64,
        i64,
        i64,
        threads=config.threads,
        min_blocks=config.min_blocks,
    )
    def softmax_long_rows_backward(dx, y, dy, N, dx_stride, y_stride, dy_stride):
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        dx_row = i64(cuda.blockIdx.x) * dx_stride
        y_row = i64(cuda.blockIdx.x) * y_stride
        dy_row = i64(cuda.blockIdx.x) * dy_stride
        chunk = config.threads * config.vectors * vec.vector
        y_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        dy_frag = cuda.local.array(config.vectors * vec.vector, mem.number)
        # dx = y * (dy - dot)  with  dot = sum(y * dy)
        dot = num.zero
        for start in range(0, N, chunk):
            for j in range(config.vectors):
                at = start + (j * config.threads + tid) * vec.vector
                vec.load(y_frag, j * vec.vector, y, y_row + at, at < N, num.zero)
                vec.load(dy_frag, j * vec.vector, dy, dy_row + at, at < N, num.zero)
            chunk_dot = num.zero
            for i in range(len(y_frag)):
                chunk_dot += y_frag[i] * dy_frag[i]
            dot += chunk_dot

        part_dot = cuda.shared.array(config.warps, mem.number)
        dot = lanes.sum(dot)
        if lane == 0:
            part_dot[warp] = dot
        cuda.syncthreads()
        dot = lanes.sum(part_dot[lane] if lane < config.warps else num.zero)

        for start in range(0, N, chunk):
            for j in range(config.vectors):
                at = start + (j * config.threads + tid) * vec.vector
                vec.load(y_frag, j * vec.vector, y, y_row + at, at < N, num.zero)
                vec.load(dy_frag, j * vec.vector, dy, dy_row + at, at < N, num.zero)
            for i in range(len(y_frag)):
                y_frag[i] *= dy_frag[i] - dot
            for j in range(config.vectors):
                at = start + (j * config.threads + tid) * vec.vector
                vec.store(dx, dx_row + at, at < N, y_frag, j * vec.vector)

    return softmax_long_rows_backward


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """A block a row, which is read twice."""
    return _choices(Call(problem, results), build_forward)


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the choices for the gradient."""
    return _choices(Call(problem, results), build_backward)


def _choices(call: Call, build: Callable[..., Kernel]) -> Iterator[Choice]:
    if not call.contiguous:
        return
    aligned = call.aligned
    config = LongRowsConfig(512, 2 if aligned else 8, aligned)
    reason = "a row is too long to be kept, and is read twice"
    args = (*call.metas, call.N, *call.row_strides)
    yield Choice("simt", config, reason, partial(one_step, build, config, call.dtype, call.M, args))
