"""A small softmax kernel that is right, and what it is made of: `build(dtype, verbs)` takes wrong parts in their place.

One block of two warps a row, contiguous rows, two readings, as in softmax/long_rows.py: every thread runs over
its share with a running maximum and sum, warps merge by shuffles and then through shared memory, and the row is read
again. `Verbs` are the steps in which kernels usually go wrong; broken.py replaces them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any, NamedTuple

from dualops.cuda.backend import Kernel, cuda, i32, i64, kernel, pointer, verb
from dualops.cuda.tile import lane_reductions, numbers, storage

THREADS = 64
WARPS = THREADS // 32


class Verbs(NamedTuple):
    """The steps of the kernel."""

    row_begin: Callable[..., Any]  # (row, stride, N): index of a row's first element
    read_end: Callable[..., Any]  # (N): columns that are read, from 0
    write_end: Callable[..., Any]  # (N): columns that are written
    load: Callable[..., Any]  # (x, index)
    larger: Callable[..., Any]  # (row_max, value, n, N)
    add: Callable[..., Any]  # (row_sum, value)
    rescaled: Callable[..., Any]  # (row_sum, old_max, new_max)
    base_of: Callable[..., Any]  # (row_max): what exponents are taken against
    lanes_max: Callable[..., Any]  # (x)
    lanes_sum: Callable[..., Any]  # (x)
    meet: Callable[..., None]  # (warp): until all warps have shared their parts
    store: Callable[..., None]  # (y, index, value)


@cache
def right(dtype: str) -> Verbs:
    """The verbs of the kernel that is right."""
    number, load, store = storage(dtype).number, storage(dtype).load, storage(dtype).store
    maximum, exp, base_of = numbers(number).maximum, numbers(number).exp, numbers(number).base
    reductions = lane_reductions(number, 32)

    @verb
    def row_begin(row, stride, N):
        return row * stride

    @verb
    def all_columns(N):
        return N

    @verb
    def larger(row_max, value, n, N):
        return maximum(row_max, value)

    @verb
    def add(row_sum, value):
        return row_sum + value

    @verb
    def rescaled(row_sum, old_max, new_max):
        return row_sum * exp(old_max - base_of(new_max))

    @verb
    def meet(warp):
        cuda.syncthreads()

    return Verbs(
        row_begin,
        all_columns,
        all_columns,
        load,
        larger,
        add,
        rescaled,
        base_of,
        reductions.max,
        reductions.sum,
        meet,
        store,
    )


@cache
def build(dtype: str, verbs: Verbs) -> Kernel:
    """softmax_small(y, x, N, y_stride, x_stride), one block a row."""
    number, element = storage(dtype).number, storage(dtype).element
    row_begin, read_end, write_end, load, larger, add, rescaled, base_of, lanes_max, lanes_sum, meet, store = verbs
    maximum, exp = numbers(number).maximum, numbers(number).exp
    NOTHING, ZERO, ONE = number(-inf), number(0), number(1)

    @kernel(pointer(element), pointer(element), i32, i64, i64, threads=THREADS)
    def softmax_small(y, x, N, y_stride, x_stride):
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        x_row = row_begin(i64(cuda.blockIdx.x), x_stride, N)
        y_row = row_begin(i64(cuda.blockIdx.x), y_stride, N)
        my_max = NOTHING
        my_sum = ZERO
        for n in range(tid, read_end(N), THREADS):
            value = load(x, x_row + n)
            new_max = larger(my_max, value, n, N)
            my_sum = add(rescaled(my_sum, my_max, new_max), exp(value - base_of(new_max)))
            my_max = new_max

        part_max = cuda.shared.array(WARPS, number)
        part_sum = cuda.shared.array(WARPS, number)
        warp_max = lanes_max(my_max)
        warp_sum = lanes_sum(my_sum * exp(my_max - base_of(warp_max)))
        if lane == 0:
            part_max[warp] = warp_max
            part_sum[warp] = warp_sum
        meet(warp)
        base = base_of(maximum(part_max[0], part_max[1]))
        rescale = ONE / (part_sum[0] * exp(part_max[0] - base) + part_sum[1] * exp(part_max[1] - base))

        for n in range(tid, write_end(N), THREADS):
            store(y, y_row + n, exp(load(x, x_row + n) - base) * rescale)

    return softmax_small


@cache
def build_through_shared(dtype: str, barrier_between: bool) -> Kernel:
    """The same through one shared array of a number a thread, used for the maximum and then for the sum.

    `barrier_between` keeps a thread from writing its sum while others still read the maxima.
    """
    number, element = storage(dtype).number, storage(dtype).element
    load, store = storage(dtype).load, storage(dtype).store
    maximum, exp, base_of = numbers(number).maximum, numbers(number).exp, numbers(number).base
    BARRIER_BETWEEN = barrier_between
    NOTHING, ZERO = number(-inf), number(0)

    @kernel(pointer(element), pointer(element), i32, i64, i64, threads=THREADS)
    def softmax_through_shared(y, x, N, y_stride, x_stride):
        tid = cuda.threadIdx.x
        x_row = i64(cuda.blockIdx.x) * x_stride
        y_row = i64(cuda.blockIdx.x) * y_stride
        parts = cuda.shared.array(THREADS, number)
        my_max = NOTHING
        for n in range(tid, N, THREADS):
            my_max = maximum(my_max, load(x, x_row + n))
        parts[tid] = my_max
        cuda.syncthreads()
        row_max = NOTHING
        for part in range(THREADS):
            row_max = maximum(row_max, parts[part])
        base = base_of(row_max)
        my_sum = ZERO
        for n in range(tid, N, THREADS):
            my_sum += exp(load(x, x_row + n) - base)
        if BARRIER_BETWEEN:
            cuda.syncthreads()
        parts[tid] = my_sum
        cuda.syncthreads()
        row_sum = ZERO
        for part in range(THREADS):
            row_sum += parts[part]
        for n in range(tid, N, THREADS):
            store(y, y_row + n, exp(load(x, x_row + n) - base) / row_sum)

    return softmax_through_shared


@cache
def build_vectors(dtype: str) -> Kernel:
    """exp(x) by 16-byte accesses wherever rows begin; the sum is one thread's. Right for rows that are aligned only."""
    kept = storage(dtype)
    number, element, load_vector, store_vector, load = (
        kept.number,
        kept.element,
        kept.load_vector,
        kept.store_vector,
        kept.load,
    )
    exp = numbers(number).exp
    VECTOR, ZERO = kept.vector, number(0)

    @kernel(pointer(element), pointer(element), i32, i64, i64, threads=THREADS)
    def softmax_vectors(y, x, N, y_stride, x_stride):
        tid = cuda.threadIdx.x
        x_row = i64(cuda.blockIdx.x) * x_stride
        y_row = i64(cuda.blockIdx.x) * y_stride
        row_sum = ZERO
        for n in range(N):
            row_sum += exp(load(x, x_row + n))
        frag = cuda.local.array(VECTOR, number)
        for n in range(tid * VECTOR, N, THREADS * VECTOR):
            load_vector(frag, 0, x, x_row + n, True, ZERO)
            for i in range(VECTOR):
                frag[i] = exp(frag[i]) / row_sum
            store_vector(y, y_row + n, True, frag, 0)

    return softmax_vectors


@cache
def build_backward(dtype: str, sees_all_lanes: bool) -> Kernel:
    """softmax_backward_small(dx, y, dy, N, stride): one warp a row; without all lanes each has a dot of its own."""
    number, element, load, store = (
        storage(dtype).number,
        storage(dtype).element,
        storage(dtype).load,
        storage(dtype).store,
    )
    _, lanes_sum = lane_reductions(number, 32 if sees_all_lanes else 1)
    ZERO = number(0)

    @kernel(pointer(element), pointer(element), pointer(element), i32, i64, threads=32)
    def softmax_backward_small(dx, y, dy, N, stride):
        row = i64(cuda.blockIdx.x) * stride
        dot = ZERO
        for n in range(cuda.threadIdx.x, N, 32):
            dot += load(y, row + n) * load(dy, row + n)
        dot = lanes_sum(dot)
        for n in range(cuda.threadIdx.x, N, 32):
            store(dx, row + n, load(y, row + n) * (load(dy, row + n) - dot))

    return softmax_backward_small
