"""PTX instructions for kernels: each file has one kind, and each instruction has a twin that the simulator runs.

Importing this package imports all files. `asm.RECORDS` lists all imported instructions, including the members of
families (`asm.FAMILIES`) that were made so far.
"""

# ruff: noqa: F401  imported for their declarations
from . import arithmetic, async_copy, convert, cp_async, matrices, mbarrier, memory, mma, registers, tma, warp, wgmma
