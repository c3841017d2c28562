"""Verbs of the norms: where a row begins, weights as numbers, sums over the threads that share a row."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..backend import cuda, verb
from ..tile import access, lane_reductions, storage


class Places(NamedTuple):
    """Where rows begin that lie along `rank` axes."""

    locate: Callable[..., None]  # (place, row, sizes): the row's place along each axis, to a local array of `rank`
    at: Callable[..., Any]  # (place, strides): where the row begins in an array with these strides


@cache
def places(rank: int) -> Places:
    """The verbs."""
    RANK = rank

    @verb
    def locate(place, row, sizes):
        for axis in range(RANK - 1, 0, -1):
            place[axis] = row % sizes[axis]
            row //= sizes[axis]
        place[0] = row

    @verb
    def at(place, strides):
        offset = place[0] * strides[0]
        for axis in range(1, RANK):
            offset += place[axis] * strides[axis]
        return offset

    return Places(locate, at)


@cache
def weights(dtype: str, weights_dtype: str | None, aligned: bool) -> Callable[..., None]:
    """A verb (frag, at, w, index, keep): as many weights as an access to x of this dtype has elements, else zeros."""
    count = access(dtype, aligned).vector
    kept = storage(weights_dtype or dtype)
    load_element, load_vector, ZERO = kept.load, kept.load_vector, storage(dtype).number(0)
    COUNT, VECTOR = count, kept.vector

    @verb
    def load_vectors(frag, at, w, index, keep):
        for c in range(0, COUNT, VECTOR):
            load_vector(frag, at + c, w, index + c, keep, ZERO)

    @verb
    def load_one(frag, at, w, index, keep):
        frag[at] = ZERO
        if keep:
            frag[at] = load_element(w, index)

    return load_vectors if aligned else load_one


@cache
def inverse_root(number: Any) -> Callable[..., Any]:
    """A verb (x): 1 / sqrt(x), both rounded correctly."""
    ONE = number(1)

    @verb
    def rsqrt(x):
        return ONE / number(math.sqrt(x))

    return rsqrt


@verb
def meet_block():
    """A barrier of the block."""
    cuda.syncthreads()


class RowSums(NamedTuple):
    """Sums over the threads of a block that share a row, one after another."""

    size: int  # of the shared array of numbers that is handed in
    sum: Callable[..., Any]  # (x, half, parts, tid): every thread of the row gets the sum; half: 0, 1, 0, 1, ...


@cache
def row_sums(number: Any, row_threads: int, rows: int) -> RowSums:
    """The verbs for `rows` rows a block. All threads of the block must call them."""
    lanes_sum = lane_reductions(number, min(row_threads, 32)).sum
    WARPS = max(row_threads // 32, 1)
    parts_sum = lane_reductions(number, WARPS).sum
    ALL = rows * WARPS

    @verb
    def row_sum(x, half, parts, tid):
        x = lanes_sum(x)
        if WARPS > 1:
            warp = tid // 32
            if tid % 32 == 0:
                parts[half * ALL + warp] = x
            cuda.syncthreads()
            x = parts_sum(parts[half * ALL + warp // WARPS * WARPS + tid % WARPS])
        return x

    return RowSums(2 * ALL, row_sum)


@cache
def pairs_sum(number: Any, parts: int) -> Callable[..., Any]:
    """A verb (pairs, at, lane): the sum of every second of 2 * `parts` numbers from pairs[at] on, for all lanes."""
    PARTS, STEP = parts, min(parts, 32)
    lanes_sum = lane_reductions(number, STEP if parts & (parts - 1) == 0 else 32).sum
    WHOLE, ZERO = parts & (parts - 1) == 0, number(0)

    @verb
    def sum_of_few(pairs, at, lane):
        total = ZERO
        for part in range(0, PARTS, STEP):
            total += pairs[at + 2 * (part + lane % STEP)]
        return lanes_sum(total)

    @verb
    def sum_of_any(pairs, at, lane):
        total = ZERO
        for part in range(lane, PARTS, 32):
            total += pairs[at + 2 * part]
        return lanes_sum(total)

    return sum_of_few if WHOLE else sum_of_any
