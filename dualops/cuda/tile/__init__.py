"""What kernels are written in: verbs on fragments (local arrays) and on the threads that share a row."""

from ..ptx import cluster_ctarank
from .numbers import Numbers, numbers
from .rows import LaneReductions, WarpParts, lane_reductions, warp_parts
from .storage import Access, Storage, access, storage

__all__ = [
    "Access",
    "LaneReductions",
    "Numbers",
    "Storage",
    "WarpParts",
    "access",
    "cluster_ctarank",
    "lane_reductions",
    "numbers",
    "storage",
    "warp_parts",
]
