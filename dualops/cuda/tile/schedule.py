"""Persistent tile schedule: which block computes which tile, with fewer blocks than tiles.

Tiles are numbered batch by batch, in groups of `group` rows of tiles, column by column within a group. So blocks that
run at the same time share rows of A and columns of B in L2. The blocks of a cluster get neighbouring tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, kept_noun, u32, verb
from ..ptx.warp import cluster_ctarank
from .boxes import Cluster


class Position(NamedTuple):
    """A tile's batch, and its number along rows and columns."""

    batch: Any
    m_block: Any
    n_block: Any


@kept_noun
def schedule(group: int, cluster: Cluster) -> Members:
    """The verbs by which a block finds its tiles. Each of N running clusters gets every N-th position.

    group: rows of tiles, a multiple of the cluster's rows.
    """
    group_rows, blocks = group // cluster.rows, cluster.blocks  # of clusters
    high, wide = cluster.rows, cluster.columns

    @verb
    def first():
        """Return the first number of this block's cluster."""
        return u32(u32(cuda.blockIdx.x) // u32(blocks))

    @verb
    def step():
        """Return the distance to the cluster's next number."""
        return u32(u32(cuda.gridDim.x) // u32(blocks))

    @verb
    def _clusters(m_blocks, n_blocks):
        """Return the number of clusters along the rows of a batch, and along its columns."""
        return u32(u32(m_blocks + (high - 1)) // u32(high)), u32(u32(n_blocks + (wide - 1)) // u32(wide))

    @verb
    def numbers(batches, m_blocks, n_blocks):
        """Return the number of positions; all u32."""
        height, width = _clusters(m_blocks, n_blocks)
        return u32(u32(batches * height) * width)

    @verb
    def position(number, m_blocks, n_blocks):
        """Return the position of this block's tile."""
        height, width = _clusters(m_blocks, n_blocks)
        tiles, group_tiles = u32(height * width), u32(group_rows * width)
        batch, place = u32(number // tiles), u32(number % tiles)
        above, place = u32(place // group_tiles * group_rows), u32(place % group_tiles)
        here = u32(min(u32(height - above), u32(group_rows)))  # rows of this group
        m_block, n_block = u32(above + place % here), u32(place // here)
        if blocks > 1:
            rank = u32(cluster_ctarank())
            m_block, n_block = u32(m_block * high + rank % high), u32(n_block * wide + rank // high)
        return Position(batch, m_block, n_block)

    return locals()
