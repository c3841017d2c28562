"""Verbs of the norms: where a row begins, weights as numbers, sums over the threads that share a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, cuda, verb
from ..tile.numbers import numbers
from ..tile.rows import lane_reductions
from ..tile.storage import access, storage


class RowAxes(Namespace):
    """Where rows begin that lie along `rank` axes."""

    locate: Callable[..., None]  # (place, row, sizes): the row's place along each axis, to a local array of `rank`
    start: Callable[..., Any]  # (place, strides): where the row begins in an array with these strides


@cache
def row_axes(rank: int) -> RowAxes:
    """The verbs."""
    RANK = rank

    @verb
    def locate(place, row, sizes):
        for axis in range(RANK - 1, 0, -1):
            place[axis] = row % sizes[axis]
            row //= sizes[axis]
        place[0] = row

    @verb
    def start(place, strides):
        offset = place[0] * strides[0]
        for axis in range(1, RANK):
            offset += place[axis] * strides[axis]
        return offset

    return RowAxes(locate=locate, start=start)


class Weights(Namespace):
    """Loads of w, or of b."""

    # (frag, at, w, index, keep): as many weights as an access to x has elements, zeros where keep is false
    load: Callable[..., None]


@cache
def weights(dtype: str, weights_dtype: str | None, aligned: bool) -> Weights:
    """The verb for weights of weights_dtype beside an x of dtype."""
    w_mem, num = storage(weights_dtype or dtype), numbers(storage(dtype).number)
    COUNT = access(dtype, aligned).vector

    @verb
    def load_vectors(frag, at, w, index, keep):
        for c in range(0, COUNT, w_mem.vector):
            w_mem.load_vector(frag, at + c, w, index + c, keep, num.zero)

    @verb
    def load_one(frag, at, w, index, keep):
        frag[at] = num.zero
        if keep:
            frag[at] = w_mem.load(w, index)

    return Weights(load=load_vectors if aligned else load_one)


@verb
def meet_block():
    """A barrier of the block."""
    cuda.syncthreads()


class RowSums(Namespace):
    """Sums over the threads of a block that share a row, one after another."""

    size: int  # of the shared array of numbers that is handed in
    sum: Callable[..., Any]  # (x, half, parts, tid): every thread of the row gets the sum; half: 0, 1, 0, 1, ...


@cache
def row_sums(number: Any, row_threads: int, rows: int) -> RowSums:
    """The verbs for `rows` rows a block. All threads of the block must call them."""
    WARPS = max(row_threads // 32, 1)
    lanes, warps = lane_reductions(number, min(row_threads, 32)), lane_reductions(number, WARPS)
    ALL = rows * WARPS

    @verb
    def row_sum(x, half, parts, tid):
        x = lanes.sum(x)
        if WARPS > 1:
            warp = tid // 32
            if tid % 32 == 0:
                parts[half * ALL + warp] = x
            cuda.syncthreads()
            x = warps.sum(parts[half * ALL + warp // WARPS * WARPS + tid % WARPS])
        return x

    return RowSums(size=2 * ALL, sum=row_sum)


class PairSums(Namespace):
    """Sums of what the warps of a row sent each other in pairs (`Parts` of the tiles)."""

    sum: Callable[..., Any]  # (pairs, at, lane): of every second number from pairs[at] on, for all lanes


@cache
def pair_sums(number: Any, parts: int) -> PairSums:
    """The verb for `parts` pairs."""
    PARTS, STEP, WHOLE = parts, min(parts, 32), parts & (parts - 1) == 0
    num, lanes = numbers(number), lane_reductions(number, STEP if WHOLE else 32)

    @verb
    def sum_of_few(pairs, at, lane):
        total = num.zero
        for part in range(0, PARTS, STEP):
            total += pairs[at + 2 * (part + lane % STEP)]
        return lanes.sum(total)

    @verb
    def sum_of_any(pairs, at, lane):
        total = num.zero
        for part in range(lane, PARTS, 32):
            total += pairs[at + 2 * part]
        return lanes.sum(total)

    return PairSums(sum=sum_of_few if WHOLE else sum_of_any)
