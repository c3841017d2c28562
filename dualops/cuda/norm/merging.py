"""How warps' sums of squares, each about its own mean, become those of a row about the row's: Chan et al. 1979."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, i32, noun, verb
from ..rows.operator import Keeping
from ..tile.numbers import numbers
from ..tile.ring import cluster_ctarank
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from .staging import RingConfig
from .variant import Variant


class WarpColumns(NamedTuple):
    """How many columns warps have of a row: one over mine, and those of the parts that my lane adds."""

    my_inverse: Any
    columns: Any
    inverse: Any


@noun
def merged_means(config: RingConfig, variant: Variant) -> Members:
    """The verbs of a block whose rows are shared by several warps.

    The verbs, for warps that sent sums of their columns as second numbers; without a mean they do nothing.
    """
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    lanes, WARPS, PARTS = lane_reductions(mem.number, 32), config.row_warps, config.row_warps * config.cluster
    LANE_PARTS, columns_of = -(-PARTS // 32), _columns_of_warps(config.row_threads, variant)

    @verb
    def columns(N, share):
        count, inverse = cuda.local.array(LANE_PARTS, mem.number), cuda.local.array(LANE_PARTS, mem.number)
        my_inverse = num.one
        if variant.centred:
            lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
            my_inverse = num.one / max(columns_of(cluster_ctarank() * WARPS + warp % WARPS, N, share), num.one)
            for k in range(LANE_PARTS):
                count[k] = columns_of(k * 32 + lane, N, share)
                inverse[k] = num.one / max(count[k], num.one)
        return WarpColumns(my_inverse, count, inverse)

    @verb
    def between(sent, found, of_warps, row_mean):
        """Return the sum of columns * (their mean - row_mean)^2, over all warps of the row."""
        total = num.zero
        for k in range(LANE_PARTS):
            part = k * 32 + cuda.threadIdx.x % 32
            if part < PARTS:
                apart = sent.pairs[found + 2 * part + 1] * of_warps.inverse[k] - row_mean
                total += of_warps.columns[k] * apart * apart
        return lanes.sum(total)

    return locals()


class ListedColumns(NamedTuple):
    """How many columns the warps of a cluster have of a row, and one over that: in shared memory."""

    columns: Any
    inverse: Any


@noun
def listed_means(keeping: Keeping, variant: Variant) -> Members:
    """The verbs of `merged_means` where registers have no room for what they need to know of each warp.

    The verbs, for warps that sent the sum of squares about their mean, and that of their columns.
    """
    number, num = storage(variant.dtype).number, numbers(storage(variant.dtype).number)
    group, WARPS, PARTS = keeping.group, keeping.row_threads // 32, keeping.group.PARTS
    LISTED, columns_of = PARTS if variant.centred else 1, _columns_of_warps(keeping.row_threads, variant)

    @verb
    def smem():
        """Return the shared arrays; once in a kernel, by all threads."""
        return ListedColumns(cuda.shared.array(LISTED, number), cuda.shared.array(LISTED, number))

    @verb
    def fill(listed, N, share):
        """Fill the list; by all threads, before `start_cluster`."""
        if variant.centred:
            for part in range(cuda.threadIdx.x, PARTS, keeping.row_threads):
                listed.columns[part] = columns_of(part, N, share)
                listed.inverse[part] = num.one / max(listed.columns[part], num.one)

    @verb
    def my_inverse(listed):
        """Return one over the number of columns of my warp."""
        return listed.inverse[cluster_ctarank() * WARPS + cuda.threadIdx.x // 32] if variant.centred else num.one

    @verb
    def merge(sent, found, listed, inverse_N):
        """Return the row's mean, and the sum of squares about it."""
        squares, total, between = num.zero, num.zero, num.zero
        for k in range(group.LANE_PARTS):
            if group.given(k):
                squares += group.a(sent, found, k)
                total += group.b(sent, found, k)
        squares, row_mean = group.lanes.sum(squares), group.lanes.sum(total) * inverse_N
        for k in range(group.LANE_PARTS):
            if group.given(k):
                apart = group.b(sent, found, k) * listed.inverse[group.part(k)] - row_mean
                between += listed.columns[group.part(k)] * apart * apart
        return row_mean, squares + group.lanes.sum(between)

    return locals()


def _columns_of_warps(row_threads: int, variant: Variant) -> Callable[[Any, Any, Any], Any]:
    """The verb (part, N, share): how many columns a warp of the cluster has of a row."""
    mem, WARPS = storage(variant.dtype), max(row_threads // 32, 1)
    WARP_COLUMNS = min(row_threads, 32) * mem.vector

    @verb
    def columns_of(part, N, share):
        rank, warp = part // WARPS, part % WARPS
        width = max(min(share, N - rank * share), 0)
        whole, rest = width // (WARPS * WARP_COLUMNS), width % (WARPS * WARP_COLUMNS)
        return mem.number(i32(whole * WARP_COLUMNS + max(min(rest - warp * WARP_COLUMNS, WARP_COLUMNS), 0)))

    return columns_of
