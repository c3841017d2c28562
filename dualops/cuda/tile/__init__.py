"""What kernels are written in: verbs on fragments (local arrays) and on the threads that share a row."""

from ..ptx import cluster_ctarank
from .numbers import Numbers, numbers
from .ring import Parts, Ring, parts, ring, start_cluster
from .rows import LaneReductions, lane_reductions
from .storage import Access, Storage, access, storage

__all__ = [
    "Access",
    "LaneReductions",
    "Numbers",
    "Parts",
    "Ring",
    "Storage",
    "access",
    "cluster_ctarank",
    "lane_reductions",
    "numbers",
    "parts",
    "ring",
    "start_cluster",
    "storage",
]
