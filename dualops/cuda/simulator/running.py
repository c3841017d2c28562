"""Run a launch: the clusters of a grid one after the other, each to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from types import FunctionType
from typing import Any

import numpy as np

from .dialect import cuda
from .meetings import Barrier
from .threads import Block, Dim3, Scheduler, Thread

ORDERS = ("forward", "reversed", "shuffled", "scattered", "lagging", "straggling", "awaited")  # see `Scheduler`
_order, _seed = "forward", 0
_waited = False  # whether a thread of the grid has waited for the previous grid


@contextmanager
def order(name: str, seed: int = 0) -> Iterator[None]:
    """Run threads and blocks in one of ORDERS, with this seed, inside the with statement."""
    global _order, _seed
    if name not in ORDERS:
        raise ValueError(f"order is {name!r}, expected one of {', '.join(ORDERS)}")
    before = _order, _seed
    _order, _seed = name, seed
    try:
        yield
    finally:
        _order, _seed = before


def launch(
    function: FunctionType,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    *,
    cluster: int = 1,
    shared_bytes: int = 0,
    overlaps: bool = False,
) -> None:
    """Run a kernel to its end. Arrays among `args` are `Pointer`s; grid, block: up to three sizes.

    `cluster` consecutive blocks along x run together. overlaps: on a GPU, the grid may begin before the previous one
    has ended. Raises the error of a thread, Deadlock, and RuntimeError if the grid could end before the previous one.
    """
    global _waited
    _waited = False
    grid3, block3 = Dim3(*grid), Dim3(*block)
    if grid3.x % cluster:
        raise ValueError(f"grid of {grid3.x} blocks along x, expected a multiple of the cluster's {cluster}")
    before = cuda.gridDim, cuda.blockDim
    cuda.gridDim, cuda.blockDim = grid3, block3
    try:
        with np.errstate(all="ignore"):
            firsts = [(x, y, z) for z in range(grid3.z) for y in range(grid3.y) for x in range(0, grid3.x, cluster)]
            for x, y, z in reversed(firsts) if _order == "reversed" else firsts:
                indices = [Dim3(x + rank, y, z) for rank in range(cluster)]
                _run_cluster(function, indices, block3, args, shared_bytes)
    finally:
        cuda.gridDim, cuda.blockDim = before
    if overlaps and not _waited:
        raise RuntimeError("a grid that overlaps the previous one has ended without waiting for it")


def waited_for_grid() -> None:
    """Note that a thread of the running grid has waited for the previous grid."""
    global _waited
    _waited = True


def _run_cluster(
    function: FunctionType, indices: list[Dim3], block_dim: Dim3, args: Sequence[Any], shared_bytes: int
) -> None:
    scheduler = Scheduler(_order, _seed)
    size = prod(block_dim)
    blocks = [Block(index, rank, size, shared_bytes) for rank, index in enumerate(indices)]
    scheduler.cluster_barrier = Barrier("barrier.cluster", size * len(blocks))
    threads = []
    for block in blocks:
        block.cluster = blocks
        for tid in range(size):
            rest, x = divmod(tid, block_dim.x)
            z, y = divmod(rest, block_dim.y)
            threads.append(Thread(lambda: function(*args), scheduler, block, Dim3(x, y, z), tid))
    scheduler.run(threads)
