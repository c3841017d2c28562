"""softmax of rows too long to be kept: each is read twice, by one block.

    1  every thread runs over its share of the row, with a running maximum and the sum in units of exp(maximum)
    2  the block merges them: maximum of maxima, sums rescaled to it     (shuffles, one barrier)
    3  the row is read again: y = exp(x - row maximum) / row sum

Milakov & Gimelshein 2018, arXiv:1805.02867, Algorithm 3. Registers: vectors * 16 / itemsize numbers a thread and array.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer
from ..tile import access, lane_reductions, numbers, storage


@dataclass(frozen=True)
class LongRowsConfig:
    """A block a row."""

    threads: int  # a multiple of 32
    vectors: int  # independent loads a thread has under way
    aligned: bool = True
    min_blocks: int = 1


@builds
def build_forward(config: LongRowsConfig, dtype: str) -> Kernel:
    """softmax_long_rows(y, x, N, y_stride, x_stride)."""
    number, element = storage(dtype).number, storage(dtype).element
    vector, load, store = access(dtype, config.aligned)
    maximum, exp, base_of = numbers(number).maximum, numbers(number).exp, numbers(number).base
    lanes_max, lanes_sum = lane_reductions(number, 32)
    VECTOR, VECTORS, THREADS, WARPS = vector, config.vectors, config.threads, config.threads // 32
    ELEMENTS, CHUNK = VECTOR * VECTORS, VECTOR * VECTORS * config.threads
    NOTHING, ZERO, ONE = number(-inf), number(0), number(1)

    @kernel(pointer(element), pointer(element), i32, i64, i64, threads=config.threads, min_blocks=config.min_blocks)
    def softmax_long_rows(y, x, N, y_stride, x_stride):
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        x_row = i64(cuda.blockIdx.x) * x_stride
        y_row = i64(cuda.blockIdx.x) * y_stride
        frag = cuda.local.array(ELEMENTS, number)
        my_max = NOTHING
        my_sum = ZERO
        for start in range(0, N, CHUNK):
            for j in range(VECTORS):
                at = start + (j * THREADS + tid) * VECTOR
                load(frag, j * VECTOR, x, x_row + at, at < N, NOTHING)
            chunk_max = NOTHING
            for i in range(ELEMENTS):
                chunk_max = maximum(chunk_max, frag[i])
            new_max = maximum(my_max, chunk_max)
            base = base_of(new_max)
            chunk_sum = ZERO  # added as one, so that a long row's sum keeps its last bits
            for i in range(ELEMENTS):
                chunk_sum += exp(frag[i] - base)
            my_sum = my_sum * exp(my_max - base) + chunk_sum
            my_max = new_max

        part_max = cuda.shared.array(WARPS, number)
        part_sum = cuda.shared.array(WARPS, number)
        warp_max = lanes_max(my_max)
        warp_sum = lanes_sum(my_sum * exp(my_max - base_of(warp_max)))
        if lane == 0:
            part_max[warp] = warp_max
            part_sum[warp] = warp_sum
        cuda.syncthreads()
        their_max = part_max[lane] if lane < WARPS else NOTHING
        their_sum = part_sum[lane] if lane < WARPS else ZERO
        base = base_of(lanes_max(their_max))
        rescale = ONE / lanes_sum(their_sum * exp(their_max - base))

        for start in range(0, N, CHUNK):
            for j in range(VECTORS):
                at = start + (j * THREADS + tid) * VECTOR
                load(frag, j * VECTOR, x, x_row + at, at < N, NOTHING)
            for i in range(ELEMENTS):
                frag[i] = exp(frag[i] - base) * rescale
            for j in range(VECTORS):
                at = start + (j * THREADS + tid) * VECTOR
                store(y, y_row + at, at < N, frag, j * VECTOR)

    return softmax_long_rows


@builds
def build_backward(config: LongRowsConfig, dtype: str) -> Kernel:
    """softmax_long_rows_backward(dx, y, dy, N, dx_stride, y_stride, dy_stride)."""
    number, element = storage(dtype).number, storage(dtype).element
    vector, load, store = access(dtype, config.aligned)
    _, lanes_sum = lane_reductions(number, 32)
    VECTOR, VECTORS, THREADS, WARPS = vector, config.vectors, config.threads, config.threads // 32
    ELEMENTS, CHUNK = VECTOR * VECTORS, VECTOR * VECTORS * config.threads
    ZERO = number(0)

    @kernel(
        pointer(element),
        pointer(element),
        pointer(element),
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
        y_frag = cuda.local.array(ELEMENTS, number)
        dy_frag = cuda.local.array(ELEMENTS, number)
        # dx = y * (dy - dot)  with  dot = sum(y * dy)
        dot = ZERO
        for start in range(0, N, CHUNK):
            for j in range(VECTORS):
                at = start + (j * THREADS + tid) * VECTOR
                load(y_frag, j * VECTOR, y, y_row + at, at < N, ZERO)
                load(dy_frag, j * VECTOR, dy, dy_row + at, at < N, ZERO)
            chunk_dot = ZERO
            for i in range(ELEMENTS):
                chunk_dot += y_frag[i] * dy_frag[i]
            dot += chunk_dot

        part_dot = cuda.shared.array(WARPS, number)
        dot = lanes_sum(dot)
        if lane == 0:
            part_dot[warp] = dot
        cuda.syncthreads()
        dot = lanes_sum(part_dot[lane] if lane < WARPS else ZERO)

        for start in range(0, N, CHUNK):
            for j in range(VECTORS):
                at = start + (j * THREADS + tid) * VECTOR
                load(y_frag, j * VECTOR, y, y_row + at, at < N, ZERO)
                load(dy_frag, j * VECTOR, dy, dy_row + at, at < N, ZERO)
            for i in range(ELEMENTS):
                y_frag[i] *= dy_frag[i] - dot
            for j in range(VECTORS):
                at = start + (j * THREADS + tid) * VECTOR
                store(dx, dx_row + at, at < N, y_frag, j * VECTOR)

    return softmax_long_rows_backward
