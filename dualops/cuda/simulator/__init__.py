"""Numba's CUDA dialect on a CPU: the threads of a block, or of a cluster of blocks, as greenlets.

Switched on as Numba's own simulator is, by NUMBA_ENABLE_CUDASIM=1 before Python starts; the kernels' source is the
same. A thread runs until it must wait (block barrier, shuffle, cluster barrier). If nobody can run, that is a deadlock,
and it is said at once with what everybody waits for. The order in which threads run is a choice: `order("reversed")`.

Memory is hostile. Local and shared arrays start as NaN (all bits set), every access outside an array is an IndexError
with the array's name, and misaligned vector access is an error, where a GPU would go on.

This package is the bottom of `dualops.cuda`: it imports nothing of ours, so that the twins of instructions (`ptx`) can
ask it who is running and wait for other threads.
"""

from .dialect import Float, Integer, cuda
from .meetings import WARP, Deadlock, MBarrier
from .memory import Local, Pointer, located, reachable
from .running import launch, order
from .threads import current, exchange

__all__ = [
    "WARP",
    "Deadlock",
    "Float",
    "Integer",
    "Local",
    "MBarrier",
    "Pointer",
    "cuda",
    "current",
    "exchange",
    "launch",
    "located",
    "order",
    "reachable",
]
