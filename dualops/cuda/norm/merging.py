"""How warps' sums of squares, each about its own mean, become those of a row about the row's: Chan et al. 1979."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..backend import Namespace, cuda, i32, verb
from ..tile.numbers import numbers
from ..tile.ring import cluster_ctarank
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from .staging import RingConfig, StagesConfig
from .variant import Variant


class WarpColumns(NamedTuple):
    """How many columns warps have of a row: one over mine, and those of the parts that my lane adds."""

    my_inverse: Any
    columns: Any
    inverse: Any


class MergedMeans(Namespace):
    """The verbs of a block whose rows are shared by several warps."""

    columns: Callable[..., WarpColumns]  # (N, share)
    # (sent, found, of_warps, row_mean): the sum of columns * (their mean - row_mean)^2, over all warps of the row
    between: Callable[..., Any]


def merged_means(config: RingConfig | StagesConfig, variant: Variant) -> MergedMeans:
    """The verbs, for warps that sent sums of their columns as second numbers; without a mean they do nothing."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    lanes, WARPS, PARTS = lane_reductions(mem.number, 32), config.row_warps, config.row_warps * config.cluster
    WARP_COLUMNS = min(config.row_threads, 32) * mem.vector
    LANE_PARTS = -(-PARTS // 32)

    @verb
    def columns_of(part, N, share):
        rank, warp = part // WARPS, part % WARPS
        width = max(min(share, N - rank * share), 0)
        whole, rest = width // (WARPS * WARP_COLUMNS), width % (WARPS * WARP_COLUMNS)
        return mem.number(i32(whole * WARP_COLUMNS + max(min(rest - warp * WARP_COLUMNS, WARP_COLUMNS), 0)))

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
        total = num.zero
        for k in range(LANE_PARTS):
            part = k * 32 + cuda.threadIdx.x % 32
            if part < PARTS:
                apart = sent.pairs[found + 2 * part + 1] * of_warps.inverse[k] - row_mean
                total += of_warps.columns[k] * apart * apart
        return lanes.sum(total)

    return MergedMeans(columns=columns, between=between)
