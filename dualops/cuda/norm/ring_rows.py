"""What ring.py and ring_prefetch.py do alike: how a ring begins, a row's sums, and what then becomes of h."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, i64, members, noun, verb
from ..rows.exchange import Exchange
from ..rows.operator import Columns
from ..tile.numbers import numbers
from ..tile.ring import Ring, RingSmem, cluster_ctarank, start_cluster
from ..tile.storage import storage
from .merging import merged_means
from .staging import Copies, RingConfig, SharedWeights, WeightsSmem
from .variant import Variant
from .verbs import norm_axes


class Block(NamedTuple):
    """What a block works on and with."""

    smem: RingSmem
    sent: Any  # the parts of rows' sums
    waiting: WeightsSmem
    columns: Columns


class Weighting(NamedTuple):
    """w + offset and b of a thread's columns: in registers, or on their way there from shared memory."""

    w_frag: Any
    b_frag: Any
    offset: Any


class Sums(NamedTuple):
    """A warp's sum of a row, and of the squares about its own mean; without a mean of squares alone."""

    total: Any
    squares: Any


@noun
def ring_rows(
    config: RingConfig, variant: Variant, pipe: Ring, staging: Copies, group: Exchange, w_and_b: SharedWeights
) -> Members:
    """The verbs of a kernel with these."""
    mem, num, axes = storage(variant.dtype), numbers(storage(variant.dtype).number), norm_axes(variant)
    merging = merged_means(config, variant)
    STEP = config.row_threads * mem.vector  # columns between a thread's vectors

    @verb
    def begin(N, share):
        """Initialize the mbarriers, and wait until the cluster runs; by all threads."""
        smem, sent, waiting = pipe.smem(), group.smem(), w_and_b.smem()
        columns = staging.columns(N, share)
        if cuda.threadIdx.x == 0:
            pipe.init(smem)
            group.init(sent)
            w_and_b.init(waiting)
        staging.clear(smem, columns)
        start_cluster()
        return Block(smem, sent, waiting, columns)

    @verb
    def feed(block, turns, arrays, params):
        """Copy w, b and all rows; by the warp that copies."""
        if cuda.threadIdx.x % 32 == 0:
            w_and_b.copy(block.waiting, params.w, params.b, block.columns)
            staging.feed(block.smem, turns, block.columns, (arrays.x, arrays.other))

    @verb
    def load(weighting, block, params):
        """Load w and b of my columns, when they are there."""
        column = cuda.threadIdx.x % config.row_threads * mem.vector
        w_and_b.wait(block.waiting)
        for v in range(config.vectors):
            n, keep = i64(block.columns.begin + column) + v * STEP, block.columns.width - column > v * STEP
            w_and_b.load_w_plus(weighting.w_frag, v * mem.vector, params.w, n, keep, weighting.offset)
            w_and_b.load_b(weighting.b_frag, v * mem.vector, params.b, n, keep)

    @verb
    def sums(frag, left, of_warps):
        """Return the sums of all h that a thread has. left: columns from its first one on."""
        mean, total, squares = num.zero, num.zero, num.zero
        if variant.centred:
            for v in range(config.vectors):
                few = num.zero  # a vector's own sum, so that no chain of additions is long
                for c in range(v * mem.vector, (v + 1) * mem.vector):
                    few += frag[c]
                total += few
            total = group.in_warp.sum(total)
            mean = total * of_warps.my_inverse
        for v in range(config.vectors):
            few = num.zero
            for c in range(v * mem.vector, (v + 1) * mem.vector):
                apart = frag[c] - mean if variant.centred else frag[c]
                few += apart * apart
            squares += few if not variant.centred or left > v * STEP else num.zero
        return Sums(total, group.in_warp.sum(squares))

    @verb
    def merge(block, found, sums, of_warps, inverse_N, eps):
        """Return the mean and rstd of the row `found`."""
        squares, row_mean = sums.squares, sums.total * inverse_N
        if group.PARTS > 1:
            squares = group.sum(block.sent, found)
            if variant.centred:
                row_mean = group.sum(block.sent, found + 1) * inverse_N
                squares += merging.between(block.sent, found, of_warps, row_mean)
        return row_mean, num.rsqrt(squares * inverse_N + eps)

    @verb
    def scale(frag, at, block, weighting, v, row_mean, row_rstd):
        """Turn h of vector v into y."""
        first, column = v * mem.vector, cuda.threadIdx.x % config.row_threads * mem.vector + v * STEP
        w_and_b.recall_w(weighting.w_frag, first, block.waiting, column, weighting.offset)
        w_and_b.recall_b(weighting.b_frag, first, block.waiting, column)
        for c in range(mem.vector):
            frag[at + c] = (frag[at + c] - row_mean) * row_rstd
            if variant.w is not None:
                frag[at + c] *= weighting.w_frag[first + c]
            if variant.b is not None:
                frag[at + c] += weighting.b_frag[first + c]

    @verb
    def end(place, params, row_mean, row_rstd, own):
        """Store the row's statistics, if they are wanted."""
        if variant.statistics:  # noqa: SIM102 Numba leaves out what an if on a constant guards
            if own & (cuda.threadIdx.x % config.row_threads == 0) & (cluster_ctarank() == 0):
                axes.write_statistics(place, params, row_mean, row_rstd)

    return members(
        locals(),
        of_warps=merging.columns,  # (N, share)
    )
