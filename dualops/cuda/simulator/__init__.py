"""Simulate Numba's CUDA dialect on a CPU: the threads of a block, or of a cluster of blocks, are greenlets.

NUMBA_ENABLE_CUDASIM=1, set before Python starts, switches it on, as Numba's own simulator. Kernels run unchanged. A
thread runs until it must wait (block barrier, shuffle, cluster barrier). If no thread can run, the simulator reports a
deadlock at once, and says what each thread waits for. Tests choose the order of threads: `order("reversed")`.

Memory is hostile. Local and shared arrays start as NaN (all bits set). Every access outside an array raises IndexError
with the array's name. A misaligned vector access is an error, also where a GPU would continue. Asynchronous units
finish as late as allowed, and see no writes without a fence: `shared`, `bulk`, `warpgroup`. Tests choose how these
units round sums: `toward_zero()`.

This package is the lowest layer of `dualops.cuda` and imports nothing from dualops. So the twins of instructions
(`ptx`) can ask it which thread is running, and wait for other threads.
"""

# ruff: noqa: F401  the names that the other packages use
from .bulk import Store, stores
from .dialect import Float, Signed, Unsigned, cuda, double, single
from .meetings import WARP, Deadlock, MBarrier
from .memory import Local, Pointer, located, reachable
from .running import launch, order, waited_for_grid
from .shared import Late, swizzled
from .sums import added_at_once, rounded_sums, toward_zero
from .tensor_map import TensorMap, as_tf32, tensor_map_at
from .threads import current, exchange
from .warpgroup import products
