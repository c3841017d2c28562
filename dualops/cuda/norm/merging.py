"""How warps' sums of squares, each about its own mean, become those of a row about the row's: Chan et al. 1979."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, noun, verb
from ..tile.numbers import numbers
from ..tile.ring import cluster_ctarank
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from .operator import columns_of_warps
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
    LANE_PARTS, columns_of = -(-PARTS // 32), columns_of_warps(config.row_threads, mem.vector, mem.number)

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
