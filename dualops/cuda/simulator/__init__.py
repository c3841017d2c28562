"""Numba's CUDA dialect on a CPU: the threads of a block, or of a cluster of blocks, as greenlets.

Switched on as Numba's own simulator is, by NUMBA_ENABLE_CUDASIM=1 before Python starts; the kernels' source is the
same. A thread runs until it must wait (block barrier, shuffle, cluster barrier). If nobody can run, that is a deadlock,
and it is said at once with what everybody waits for. The order in which threads run is a choice: `order("reversed")`.

Memory is hostile. Local and shared arrays start as NaN (all bits set), every access outside an array is an IndexError
with the array's name, and misaligned vector access is an error, where a GPU would go on. Asynchronous units
are late and see nothing that was not fenced: `shared`, `bulk`, `warpgroup`. How their sums are rounded is a
choice, too: `toward_zero()`.

This package is the bottom of `dualops.cuda`: it imports nothing of ours, so that the twins of instructions (`ptx`) can
ask it who is running and wait for other threads.
"""

from .bulk import Store, stores
from .dialect import Float, Signed, Unsigned, cuda
from .meetings import WARP, Deadlock, MBarrier
from .memory import Local, Pointer, located, reachable
from .numbers import double, single
from .running import launch, order, waited_for_grid
from .shared import Late, swizzled
from .sums import added_at_once, rounded_sums, toward_zero
from .tensor_map import TensorMap, as_tf32, tensor_map_at
from .threads import current, exchange
from .warpgroup import products

__all__ = [
    "WARP",
    "Deadlock",
    "Float",
    "Late",
    "Local",
    "MBarrier",
    "Pointer",
    "Signed",
    "Store",
    "TensorMap",
    "Unsigned",
    "added_at_once",
    "as_tf32",
    "cuda",
    "current",
    "double",
    "exchange",
    "launch",
    "located",
    "order",
    "products",
    "reachable",
    "rounded_sums",
    "single",
    "stores",
    "swizzled",
    "tensor_map_at",
    "toward_zero",
    "waited_for_grid",
]
