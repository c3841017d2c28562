"""What kernels are written in: verbs on fragments (local arrays) and on the threads that share a row."""

from ..ptx import cluster_ctarank, ld_shared_v4_f32
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
    "ld_shared_v4_f32",
    "numbers",
    "storage",
    "warp_parts",
]
