"""Verbs of the norms: where a row begins, weights as numbers, sums over the threads that share a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ...spec.meta import compute_dtype
from ..compiler.backend import Members, Noun, cuda, i32, members, noun, u32, verb
from ..row_walk import RowAxes, row_axes
from ..tile.numbers import numbers
from ..tile.ring import parts
from ..tile.rows import lane_reductions
from ..tile.storage import access, storage
from .variant import Variant


class Columns(NamedTuple):
    """Those of a row that a block has."""

    begin: int
    width: int


class NormAxes(RowAxes):
    """Where rows begin, and the numbers that each of them has."""

    statistics: Callable[..., Any]  # (place, inputs) -> the row's mean, 0 where there is none, and rstd
    write_statistics: Callable[..., None]  # (place, to, row_mean, row_rstd)


@cache
def norm_axes(variant: Variant) -> NormAxes:
    """The verbs."""
    mem, num = storage(compute_dtype(variant.dtype)), numbers(storage(variant.dtype).number)
    axes = row_axes(variant.rank)

    @verb
    def statistics(place, inputs):
        row_mean, row_rstd = num.zero, mem.load(inputs.rstd.data, axes.start(place, inputs.rstd))
        if variant.centred:
            row_mean = mem.load(inputs.mean.data, axes.start(place, inputs.mean))
        return row_mean, row_rstd

    @verb
    def write_statistics(place, to, row_mean, row_rstd):
        mem.store(to.rstd.data, axes.start(place, to.rstd), row_rstd)
        if variant.centred:
            mem.store(to.mean.data, axes.start(place, to.mean), row_mean)

    return NormAxes(
        place=axes.place,
        locate=axes.locate,
        start=axes.start,
        statistics=statistics,
        write_statistics=write_statistics,
    )


@cache
@noun
def weights(variant: Variant, aligned: bool) -> Members:
    """Loads of w and b: as many as an access to x has elements, zeros where keep is false.

    Of what a call does not have, nothing is loaded.

    The verbs for w and b of the variant's dtypes.
    """
    count, load_w = access(variant.dtype, aligned).vector, _loads(variant.dtype, variant.w, aligned)

    @verb
    def load_w_plus(frag, at, w, index, keep, offset):
        """Load w + offset."""
        if variant.w is not None:
            load_w(frag, at, w, index, keep)
            for c in range(at, at + count):
                frag[c] += offset

    return members(
        locals(),
        load_w=load_w,  # (frag, at, w, index, keep)
        load_b=_loads(variant.dtype, variant.b, aligned),  # (frag, at, b, index, keep)
    )


def _loads(dtype: str, weights_dtype: str | None, aligned: bool) -> Callable[..., None]:
    """The verb (frag, at, w, index, keep) for weights of weights_dtype with an x of dtype."""
    mem, num = storage(weights_dtype or dtype), numbers(storage(dtype).number)
    count = access(dtype, aligned).vector

    @verb
    def load_none(frag, at, w, index, keep):
        pass

    @verb
    def load_vectors(frag, at, w, index, keep):
        for c in range(0, count, mem.vector):
            mem.load_vector(frag, at + c, w, index + c, keep, num.zero)

    @verb
    def load_one(frag, at, w, index, keep):
        frag[at] = num.zero
        if keep:
            frag[at] = mem.load(w, index)

    if weights_dtype is None:
        return load_none
    return load_vectors if aligned else load_one


@verb
def meet_block():
    """A barrier of the block."""
    cuda.syncthreads()


@cache
@noun
def row_sums(number: Any, row_threads: int, rows: int) -> Members:
    """Sums over the threads of a block that share a row, one after another.

    The verbs for `rows` rows a block. All threads of the block must call them.
    """
    WARPS = max(row_threads // 32, 1)
    lanes, warps = lane_reductions(number, min(row_threads, 32)), lane_reductions(number, WARPS)
    ALL = rows * WARPS
    LANES, ROW_WARPS, THREADS = u32(32), u32(WARPS), u32(row_threads)

    @verb
    def smem():
        """Return the shared array of warps' sums; once in a kernel, by all threads."""
        return cuda.shared.array(2 * ALL, number)

    @verb
    def sum(x, half, parts):
        """Return the sum to every thread of the row. half: 0, 1, 0, 1, ..."""
        x = lanes.sum(x)
        if WARPS > 1:
            tid = u32(cuda.threadIdx.x)  # no sign to look after
            if tid % LANES == 0:
                parts[half * ALL + i32(tid // LANES)] = x
            cuda.syncthreads()
            x = warps.sum(parts[half * ALL + i32(tid // THREADS * ROW_WARPS + tid % ROW_WARPS)])
        return x

    return locals()


ClusterSums = Noun  # what `cluster_sums` makes


@cache
@noun
def cluster_sums(number: Any, row_threads: int, rows: int, cluster: int, kept: int = 2) -> Members:
    """Sums over the threads of a cluster that share a row: warps send theirs to every block, and each adds all.

    A warp sends two numbers, which are added apart (`Parts` of the tiles).

    The verbs for `rows` rows a block, each shared by `row_threads` threads in each of `cluster` blocks.

    kept: as of `parts`.
    """
    WARPS = max(row_threads // 32, 1)
    PARTS = WARPS * cluster
    STEP, WHOLE = min(PARTS, 32), PARTS & (PARTS - 1) == 0
    num, in_warp = numbers(number), lane_reductions(number, min(row_threads, 32))
    warpgroup_barrier = parts(number, num.send_pair, WARPS, cluster, rows, kept)
    lanes = lane_reductions(number, STEP if WHOLE else 32)

    @verb
    def _few(sent, at):
        lane, total = i32(cuda.threadIdx.x % STEP), num.zero
        for part in range(0, PARTS, STEP):
            total += sent.pairs[u32(at + 2 * (part + lane))]
        return total

    @verb
    def _any_number(sent, at):
        total = num.zero
        for part in range(cuda.threadIdx.x % 32, PARTS, 32):
            total += sent.pairs[at + 2 * part]
        return total

    mine = _few if WHOLE else _any_number  # of the parts, before lanes add up theirs

    @verb
    def sum(sent, at):
        """Return the sum of every second number from there on, to all lanes."""
        return lanes.sum(mine(sent, at))

    @verb
    def sum_two(sent, at):
        """Return the sum of a's parts, and of b's."""
        return lanes.sum_two(mine(sent, at), mine(sent, at + 1))

    return members(
        locals(),
        parts=PARTS,  # warps that share a row
        smem=warpgroup_barrier.smem,
        init=warpgroup_barrier.init,  # (sent)
        of_warp=in_warp.sum,  # (x): over the lanes of my warp that share my row
        two_of_warp=in_warp.sum_two,  # (a, b) -> both
        send=warpgroup_barrier.send,  # (sent, row_round, a, b)
        wait=warpgroup_barrier.wait,  # (sent, row_round) -> where a's parts begin in sent.pairs; one further on, b's
    )
