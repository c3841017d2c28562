"""What kernels are written in: verbs on fragments (local arrays) and on the threads that share a row."""

from ..ptx import bar_sync, cluster_ctarank, cospi_f64, opaque_i32, pow_f64, sinpi_f64, store_words
from .groups import array_in, group
from .numbers import Numbers, numbers
from .products import LANES, PAD, THREADS, Products, neighbours, products, row_of, tile_load
from .ring import Parts, Ring, fetch, init_fetch, parts, ring, start_cluster, start_fetch, wait_fetch
from .rounded import Rounded, rounded
from .rows import LaneReductions, lane_reductions
from .storage import Access, Storage, access, storage

__all__ = [
    "LANES",
    "PAD",
    "THREADS",
    "Access",
    "LaneReductions",
    "Numbers",
    "Parts",
    "Products",
    "Ring",
    "Rounded",
    "Storage",
    "access",
    "array_in",
    "bar_sync",
    "cluster_ctarank",
    "cospi_f64",
    "fetch",
    "group",
    "init_fetch",
    "lane_reductions",
    "neighbours",
    "numbers",
    "opaque_i32",
    "parts",
    "pow_f64",
    "products",
    "ring",
    "rounded",
    "row_of",
    "sinpi_f64",
    "start_cluster",
    "start_fetch",
    "storage",
    "store_words",
    "tile_load",
    "wait_fetch",
]
