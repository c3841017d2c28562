"""The kernels of the steps tree, shuffles, registers and vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from dualops.cuda.compiler.backend import Kernel, Namespace, builds, cuda, i32, i64, kernel, pointer, verb
from dualops.cuda.tile.numbers import numbers
from dualops.cuda.tile.rows import lane_reductions
from dualops.cuda.tile.storage import access, storage

# --- how the threads of a block agree on one number ----------------------------------------------


class Agreement(Namespace):
    """Verbs that reduce a block's numbers: every thread passes its x, and gets the maximum, or the sum, of all.

    `part` is a shared array that is used once, so that no thread needs to wait until the others have read it.
    """

    size: int  # of `part`
    max: Callable[..., Any]  # (x, part)
    sum: Callable[..., Any]  # (x, part)


@verb
def add(a, b):
    return a + b


@cache
def by_tree(number: Any, threads: int) -> Agreement:
    """Reduce by a tree: the first half of the threads combines its numbers with those of the second half, then half of
    these do, and so on to thread 0.

    Barriers: 1 + log2(threads). The busy threads are neighbours and read neighbours: no two in one bank.
    """

    def along(combine: Callable[..., Any]) -> Callable[..., Any]:
        @verb
        def agree(x, part):
            tid = cuda.threadIdx.x
            part[tid] = x
            cuda.syncthreads()
            half = threads // 2
            while half > 0:
                if tid < half:
                    part[tid] = combine(part[tid], part[tid + half])
                cuda.syncthreads()
                half >>= 1
            return part[0]

        return agree

    return Agreement(size=threads, max=along(numbers(number).maximum), sum=along(add))


@cache
def by_shuffles(number: Any, threads: int) -> Agreement:
    """Reduce by shuffles: the lanes of a warp exchange registers. Each warp writes one number, and every warp combines
    the numbers of all warps.

    Barriers: 1. All 32 lanes are busy, and get the same number.
    """
    warps = threads // 32
    lanes, parts = lane_reductions(number, 32), lane_reductions(number, warps)

    def along(among_lanes: Callable[..., Any], among_warps: Callable[..., Any]) -> Callable[..., Any]:
        @verb
        def agree(x, part):
            lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
            x = among_lanes(x)
            if lane == 0:
                part[warp] = x
            cuda.syncthreads()
            return among_warps(part[lane % warps])

        return agree

    return Agreement(size=warps, max=along(lanes.max, parts.max), sum=along(lanes.sum, parts.sum))


AGREEMENTS = {"tree": by_tree, "shuffles": by_shuffles}


# --- tree, shuffles ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadAgainConfig:
    """One block per row, which is read three times."""

    threads: int  # a power of two, at least 32
    agree: str  # "tree" or "shuffles"


@builds
def build_read_again(config: ReadAgainConfig, dtype: str) -> Kernel:
    """softmax_read_again(y, x, N): a block takes a row, thread `tid` of it the elements tid, tid + threads, ...

        1  the maximum of my elements; the block agrees on the row's
        2  x again: the sum of exp(x - maximum) over my elements; the block agrees on the row's
        3  x again: y = exp(x - maximum) / sum

    Shared memory: two numbers per thread by tree, two per warp by shuffles.
    """
    mem = storage(dtype)
    num, block = numbers(mem.number), AGREEMENTS[config.agree](mem.number, config.threads)

    @kernel(pointer(mem.element), pointer(mem.element), i32, threads=config.threads)
    def softmax_read_again(y, x, N):
        tid = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x) * N  # index of its first element
        part_max = cuda.shared.array(block.size, mem.number)
        part_sum = cuda.shared.array(block.size, mem.number)

        my_max = num.minus_inf
        for n in range(tid, N, config.threads):
            my_max = num.maximum(my_max, mem.load(x, row + n))
        row_max = block.max(my_max, part_max)

        my_sum = num.zero
        for n in range(tid, N, config.threads):
            my_sum += num.exp(mem.load(x, row + n) - row_max)
        rescale = num.one / block.sum(my_sum, part_sum)

        for n in range(tid, N, config.threads):
            mem.store(y, row + n, num.exp(mem.load(x, row + n) - row_max) * rescale)

    return softmax_read_again


# --- registers, vectors --------------------------------------------------------------------------


@dataclass(frozen=True)
class KeepConfig:
    """One block per row, which is kept in registers."""

    threads: int  # a power of two, at least 32
    loads: int  # loads per thread, all started before it needs the first
    aligned: bool  # whether a load reads 16 bytes, else one element

    def columns(self, dtype: str) -> int:
        """Return the length of the longest row."""
        return self.threads * self.loads * access(dtype, self.aligned).vector


@builds
def build_keep(config: KeepConfig, dtype: str) -> Kernel:
    """softmax_keep(y, x, N): a block takes a row, thread `tid` of it the vectors tid, tid + threads, ...

        1  all my elements to registers; beyond the row's end -infinity, which changes neither maximum nor sum
        2  their maximum; the block agrees on the row's
        3  e = num.exp(x - maximum) in their place, and the sum of e; the block agrees on the row's
        4  y = e / sum

    Registers: loads * vector numbers per thread, and about 20 more. Shared memory: two numbers per warp.
    """
    mem, vec = storage(dtype), access(dtype, config.aligned)
    num, block = numbers(mem.number), by_shuffles(mem.number, config.threads)

    @kernel(pointer(mem.element), pointer(mem.element), i32, threads=config.threads)
    def softmax_keep(y, x, N):
        tid = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x) * N  # index of its first element
        part_max = cuda.shared.array(block.size, mem.number)
        part_sum = cuda.shared.array(block.size, mem.number)
        frag = cuda.local.array(config.loads * vec.vector, mem.number)  # my elements of x, then e, then y
        for j in range(config.loads):
            n = (j * config.threads + tid) * vec.vector
            vec.load(frag, j * vec.vector, x, row + n, n < N, num.minus_inf)

        my_max = num.minus_inf
        for i in range(len(frag)):
            my_max = num.maximum(my_max, frag[i])
        row_max = block.max(my_max, part_max)

        my_sum = num.zero
        for i in range(len(frag)):
            frag[i] = num.exp(frag[i] - row_max)
            my_sum += frag[i]
        rescale = num.one / block.sum(my_sum, part_sum)

        for i in range(len(frag)):
            frag[i] *= rescale
        for j in range(config.loads):
            n = (j * config.threads + tid) * vec.vector
            vec.store(y, row + n, n < N, frag, j * vec.vector)

    return softmax_keep
