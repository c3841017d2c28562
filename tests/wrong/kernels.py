"""A small correct softmax kernel, built from replaceable steps: `build(dtype, verbs)` accepts wrong ones.

One block of two warps per row, contiguous rows, and two passes over a row, as in rows/reread.py. Each thread goes
through its elements with a running maximum and sum. The warps merge these by shuffles and then through shared memory,
and the row is read again. `Verbs` are the steps in which kernels usually go wrong; broken.py replaces them one by one.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from dualops.cuda.compiler.backend import Kernel, Namespace, cuda, i32, i64, kernel, pointer, verb
from dualops.cuda.tile.numbers import numbers
from dualops.cuda.tile.rows import lane_reductions
from dualops.cuda.tile.storage import storage

THREADS = 64
WARPS = THREADS // 32


class Verbs(Namespace):
    """The steps of the kernel."""

    row_begin: Callable[..., Any]  # (row, stride, N): index of a row's first element
    read_end: Callable[..., Any]  # (N): columns that are read, from 0
    write_end: Callable[..., Any]  # (N): columns that are written
    load: Callable[..., Any]  # (x, index)
    larger: Callable[..., Any]  # (row_max, value, n, N)
    add: Callable[..., Any]  # (row_sum, value)
    rescaled: Callable[..., Any]  # (row_sum, old_max, new_max)
    base_of: Callable[..., Any]  # (row_max): the number that is subtracted before exp
    lanes_max: Callable[..., Any]  # (x)
    lanes_sum: Callable[..., Any]  # (x)
    meet: Callable[..., None]  # (warp): until all warps have shared their parts
    store: Callable[..., None]  # (y, index, value)


@cache
def right(dtype: str) -> Verbs:
    """Return the verbs of the correct kernel."""
    mem = storage(dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, 32)

    @verb
    def row_begin(row, stride, N):
        return row * stride

    @verb
    def all_columns(N):
        return N

    @verb
    def larger(row_max, value, n, N):
        return num.maximum(row_max, value)

    @verb
    def add(row_sum, value):
        return row_sum + value

    @verb
    def rescaled(row_sum, old_max, new_max):
        return row_sum * num.exp(old_max - num.base(new_max))

    @verb
    def meet(warp):
        cuda.syncthreads()

    return Verbs(
        row_begin=row_begin,
        read_end=all_columns,
        write_end=all_columns,
        load=mem.load,
        larger=larger,
        add=add,
        rescaled=rescaled,
        base_of=num.base,
        lanes_max=lanes.max,
        lanes_sum=lanes.sum,
        meet=meet,
        store=mem.store,
    )


@cache
def build(dtype: str, verbs: Verbs) -> Kernel:
    """Build softmax_small(y, x, N, y_stride, x_stride), with one block per row."""
    mem, num = storage(dtype), numbers(storage(dtype).number)

    @kernel(pointer(mem.element), pointer(mem.element), i32, i64, i64, threads=THREADS)
    def softmax_small(y, x, N, y_stride, x_stride):
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        x_row = verbs.row_begin(i64(cuda.blockIdx.x), x_stride, N)
        y_row = verbs.row_begin(i64(cuda.blockIdx.x), y_stride, N)
        my_max = num.minus_inf
        my_sum = num.zero
        for n in range(tid, verbs.read_end(N), THREADS):
            value = verbs.load(x, x_row + n)
            new_max = verbs.larger(my_max, value, n, N)
            my_sum = verbs.add(verbs.rescaled(my_sum, my_max, new_max), num.exp(value - verbs.base_of(new_max)))
            my_max = new_max

        part_max = cuda.shared.array(WARPS, mem.number)
        part_sum = cuda.shared.array(WARPS, mem.number)
        warp_max = verbs.lanes_max(my_max)
        warp_sum = verbs.lanes_sum(my_sum * num.exp(my_max - verbs.base_of(warp_max)))
        if lane == 0:
            part_max[warp] = warp_max
            part_sum[warp] = warp_sum
        verbs.meet(warp)
        base = verbs.base_of(num.maximum(part_max[0], part_max[1]))
        rescale = num.one / (part_sum[0] * num.exp(part_max[0] - base) + part_sum[1] * num.exp(part_max[1] - base))

        for n in range(tid, verbs.write_end(N), THREADS):
            verbs.store(y, y_row + n, num.exp(verbs.load(x, x_row + n) - base) * rescale)

    return softmax_small


@cache
def build_through_shared(dtype: str, barrier_between: bool) -> Kernel:
    """Build the same kernel with one shared array of a number per thread, used for the maximum and then for the sum.

    `barrier_between` keeps a thread from writing its sum while others still read the maxima.
    """
    mem, num = storage(dtype), numbers(storage(dtype).number)
    BARRIER_BETWEEN = barrier_between

    @kernel(pointer(mem.element), pointer(mem.element), i32, i64, i64, threads=THREADS)
    def softmax_through_shared(y, x, N, y_stride, x_stride):
        tid = cuda.threadIdx.x
        x_row = i64(cuda.blockIdx.x) * x_stride
        y_row = i64(cuda.blockIdx.x) * y_stride
        parts = cuda.shared.array(THREADS, mem.number)
        my_max = num.minus_inf
        for n in range(tid, N, THREADS):
            my_max = num.maximum(my_max, mem.load(x, x_row + n))
        parts[tid] = my_max
        cuda.syncthreads()
        row_max = num.minus_inf
        for part in range(THREADS):
            row_max = num.maximum(row_max, parts[part])
        base = num.base(row_max)
        my_sum = num.zero
        for n in range(tid, N, THREADS):
            my_sum += num.exp(mem.load(x, x_row + n) - base)
        if BARRIER_BETWEEN:
            cuda.syncthreads()
        parts[tid] = my_sum
        cuda.syncthreads()
        row_sum = num.zero
        for part in range(THREADS):
            row_sum += parts[part]
        for n in range(tid, N, THREADS):
            mem.store(y, y_row + n, num.exp(mem.load(x, x_row + n) - base) / row_sum)

    return softmax_through_shared


@cache
def build_vectors(dtype: str) -> Kernel:
    """Build a kernel with 16-byte accesses wherever rows begin; one thread computes the sum. Right for aligned rows."""
    mem, num = storage(dtype), numbers(storage(dtype).number)
    VECTOR = mem.vector

    @kernel(pointer(mem.element), pointer(mem.element), i32, i64, i64, threads=THREADS)
    def softmax_vectors(y, x, N, y_stride, x_stride):
        tid = cuda.threadIdx.x
        x_row = i64(cuda.blockIdx.x) * x_stride
        y_row = i64(cuda.blockIdx.x) * y_stride
        row_sum = num.zero
        for n in range(N):
            row_sum += num.exp(mem.load(x, x_row + n))
        frag = cuda.local.array(VECTOR, mem.number)
        for n in range(tid * VECTOR, N, THREADS * VECTOR):
            mem.load_vector(frag, 0, x, x_row + n, True, num.zero)
            for i in range(VECTOR):
                frag[i] = num.exp(frag[i]) / row_sum
            mem.store_vector(y, y_row + n, True, frag, 0)

    return softmax_vectors


@cache
def build_backward(dtype: str, sees_all_lanes: bool) -> Kernel:
    """Build softmax_backward_small(dx, y, dy, N, stride), with one warp per row. Without all lanes, each lane has its
    own dot.
    """
    mem, num = storage(dtype), numbers(storage(dtype).number)
    lanes = lane_reductions(mem.number, 32 if sees_all_lanes else 1)

    @kernel(pointer(mem.element), pointer(mem.element), pointer(mem.element), i32, i64, threads=32)
    def softmax_backward_small(dx, y, dy, N, stride):
        row = i64(cuda.blockIdx.x) * stride
        dot = num.zero
        for n in range(cuda.threadIdx.x, N, 32):
            dot += mem.load(y, row + n) * mem.load(dy, row + n)
        dot = lanes.sum(dot)
        for n in range(cuda.threadIdx.x, N, 32):
            mem.store(dx, row + n, mem.load(y, row + n) * (mem.load(dy, row + n) - dot))

    return softmax_backward_small
