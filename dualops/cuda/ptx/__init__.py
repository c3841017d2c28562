"""PTX instructions for kernels, a file a chapter, each with the twin that the simulator runs.

`asm.RECORDS` lists those of the chapters that were imported; importing this package imports all of them.
"""

from . import arithmetic, asm, async_copy, convert, mbarrier, memory, warp

__all__ = ["arithmetic", "asm", "async_copy", "convert", "mbarrier", "memory", "warp"]
